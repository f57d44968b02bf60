#include "tests/support/device/device.h"

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>

#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "tests/support/device/kernels.h"
#include "tests/support/device/memory.h"

namespace tessera::testing::device {

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kStreams = 8;  // of each device; 0 is the default one

std::function<int()>& first_device() {
  static auto& instance = *new std::function<int()>();
  return instance;
}

Stream& stream(int device, int64_t id) {
  static auto& instance = *new std::array<std::array<Stream, kStreams>, kDevices>();
  return instance.at(device).at(id);
}

struct Current {
  int device = first_device() ? first_device()() : 0;
  std::array<c10::StreamId, kDevices> streams{};
};

Current& current() {
  thread_local Current instance;
  return instance;
}

int index_of(c10::Device device) { return device.has_index() ? device.index() : current().device; }

struct Event {
  Stream* stream;
  uint64_t number;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device previous = getDevice();
    setDevice(device);
    return previous;
  }
  c10::Device getDevice() const override {
    return c10::Device(kType, static_cast<c10::DeviceIndex>(current().device));
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "There is no device ", device);
    current().device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current().device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return made(device, current().streams[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return made(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*is_high_priority*/) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    static std::atomic<int64_t> next = 0;
    return made(device, 1 + next++ % (kStreams - 1));
  }
  c10::Stream exchangeStream(c10::Stream given) const override {
    c10::StreamId& id = current().streams[index_of(given.device())];
    return made(given.device(), std::exchange(id, given.id()));
  }
  bool queryStream(const c10::Stream& given) const override {
    Stream& queue = of(given);
    return queue.is_done(queue.submitted());
  }
  void synchronizeStream(const c10::Stream& given) const override { of(given).wait(); }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    for (int id = 0; id < kStreams; ++id) stream(index < 0 ? current().device : index, id).wait();
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& given) const override {
    if (memory.get()) add_user(memory.get(), of(given));
  }

  void record(void** event, const c10::Stream& given, c10::DeviceIndex /*index*/,
              c10::EventFlag /*flag*/) const override {
    if (!*event) *event = new Event();
    *static_cast<Event*>(*event) = {&of(given), of(given).submitted()};
  }
  void block(void* event, const c10::Stream& given) const override {
    if (!event) return;
    of(given).submit([it = *static_cast<Event*>(event)] { it.stream->wait(it.number); });
  }
  bool queryEvent(void* event) const override {
    const auto* it = static_cast<Event*>(event);
    return !it || it->stream->is_done(it->number);
  }
  void synchronizeEvent(void* event) const override {
    if (const auto* it = static_cast<Event*>(event)) it->stream->wait(it->number);
  }
  void destroyEvent(void* event, c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<Event*>(event);
  }

 private:
  static c10::Stream made(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE,
                       c10::Device(kType, static_cast<c10::DeviceIndex>(index_of(device))), id);
  }
  static Stream& of(const c10::Stream& given) { return stream(index_of(given.device()), given.id()); }
};

/// Memory is freed when the streams that use it come to that, as by the caching allocators of GPUs.
class TileAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(current().device));
    if (bytes == 0) return {nullptr, device};
    auto* context = new Context{device::allocate(bytes), &current_stream(device)};
    return {context->memory, context, &free, device};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    if (bytes == 0) return;
    current_stream(c10::Device(kType)).wait();
    const Access access({to, from});
    std::memcpy(to, from, bytes);
  }

 private:
  struct Context {
    void* memory;
    Stream* stream;
  };
  static void free(void* given) {
    const std::unique_ptr<Context> context(static_cast<Context*>(given));
    std::vector<Event> others;
    for (Stream* user : users_of(context->memory)) others.push_back({user, user->submitted()});
    context->stream->submit([memory = context->memory, others] {
      for (const Event& each : others) each.stream->wait(each.number);
      release(memory);
    });
  }
};

/// A seed, and how many numbers were drawn.
class TileGenerator final : public c10::GeneratorImpl {
 public:
  explicit TileGenerator(c10::DeviceIndex index)
      : GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override {
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::TensorBase state = at::detail::empty_cpu({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_, words[1] = offset_;
    return state.getIntrusivePtr();
  }

 private:
  TileGenerator* clone_impl() const override {
    auto* copy = new TileGenerator(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current().device);
  }
  void setCurrentDevice(c10::DeviceIndex index) const override { current().device = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(current().device, index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static const auto& generators = *[] {
      auto* all = new std::vector<at::Generator>();
      for (int i = 0; i < kDevices; ++i)
        all->push_back(at::make_generator<TileGenerator>(static_cast<c10::DeviceIndex>(i)));
      return all;
    }();
    return generators.at(index < 0 ? current().device : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<TileGenerator>(
        static_cast<c10::DeviceIndex>(index < 0 ? current().device : index));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

}  // namespace

Stream& current_stream(c10::Device device) {
  const int index = index_of(device);
  return stream(index, current().streams[index]);
}

void set_first_device(std::function<int()> of_thread) { first_device() = std::move(of_thread); }

void synchronize() {
  for (int index = 0; index < kDevices; ++index)
    for (int id = 0; id < kStreams; ++id) stream(index, id).wait();
}

void enable() {
  static const bool once = [] {
    static TileAllocator allocator;
    c10::SetAllocator(kType, &allocator);
    static const Guard guard;
    static const c10::impl::DeviceGuardImplRegistrar registrar(kType, &guard);
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    c10::register_privateuse1_backend("tile");
    register_kernels();
    return true;
  }();
  static_cast<void>(once);
}

}  // namespace tessera::testing::device
