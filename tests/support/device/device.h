#pragma once

#include <functional>

#include <c10/core/Device.h>

#include "tests/support/device/streams.h"

/// A device for tests, "tile": what a GPU is to a program, but computed by the CPU kernels of libtorch.
///   - The host cannot touch its memory: a read outside of the device's kernels ends the process.
///   - Its results come later: each stream is a queue, so work of another stream, and copies to the host that
///     do not block, are seen too early where synchronization is missing.
///   - It has generators, events and a current device and stream of each thread, as a GPU has.
/// A kernel waits for the work of its stream, computes at once, and writes its results when the stream comes
/// to it. So errors of kernels are thrown where they are called, and what a kernel reads is never too late.
/// It has no pinned memory, and no sparse, quantized or nested tensors.
namespace tessera::testing::device {

/// Makes the device known to libtorch. Once in a process; calls after that do nothing.
void enable();

constexpr int kDevices = 32;

/// The current stream of the calling thread on this device.
Stream& current_stream(c10::Device device);

/// Which device a thread begins with; without this, 0. So ranks that are threads get a device each.
void set_first_device(std::function<int()> of_thread);

/// Waits for all work of all devices.
void synchronize();

/// Where true, as at first, kernels refuse host tensors beside those of the device, as those of a GPU do. Only
/// comparisons of whole tensors (at::equal, at::allclose) take them if false: with results of the host.
void set_strict_comparisons(bool strict);
bool has_strict_comparisons();

}  // namespace tessera::testing::device
