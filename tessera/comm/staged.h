#pragma once

#include <functional>
#include <string>

#include <c10/core/DeviceType.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

/// Tensors of a device that a backend does not carry: they go through the memory of the host.
namespace tessera::comm {

/// Whether the backend takes tensors of this device as they are.
bool carries(const std::string& backend, c10::DeviceType device);

/// A backend that carries tensors of the CPU as `carrier` does, and those of any other device through copies on the
/// host. A call copies what it reads, once the device has it: after all that the current stream was given. Waiting
/// for its work copies what it wrote to the device, on the stream that is current then.
c10::intrusive_ptr<c10d::Backend> make_staged(c10::intrusive_ptr<c10d::Backend> carrier);

/// What moves the bytes: the carrier of a staged backend, else the backend itself.
c10::intrusive_ptr<c10d::Backend> carrier_of(c10::intrusive_ptr<c10d::Backend> backend);

/// What a staged backend returned, in two parts: the work of its carrier, and what is left to do after that.
/// Other work is returned as it is, with nothing left to do.
struct StagedParts {
  c10::intrusive_ptr<c10d::Work> work;
  std::function<void()> finish;
};
StagedParts parts_of(c10::intrusive_ptr<c10d::Work> work);

}  // namespace tessera::comm
