#include "tests/support/device/device.h"

#include <chrono>
#include <csignal>
#include <cstring>
#include <thread>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

namespace tessera::testing::device {
namespace {

using namespace std::chrono_literals;

class Device : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
    enable();
  }
  void SetUp() override { at::manual_seed(0); }
  void TearDown() override { synchronize(); }

  const c10::Device tile{"tile"};
  const at::TensorOptions on_tile = at::TensorOptions(tile);
  const c10::impl::VirtualGuardImpl impl{c10::DeviceType::PrivateUse1};
};

TEST_F(Device, IsADevice) {
  EXPECT_EQ(tile.type(), at::kPrivateUse1);
  const at::Tensor tensor = at::ones({2, 3}, on_tile);
  EXPECT_EQ(tensor.device().str(), "tile:0");
  EXPECT_EQ(at::ones({2}, on_tile.device(c10::Device("tile:3"))).device().index(), 3);
  EXPECT_TRUE(at::equal(tensor.cpu(), at::ones({2, 3})));
}

TEST_F(Device, HostCannotTouchItsMemory) {
  const at::Tensor tensor = at::ones({2, 3}, on_tile);
  synchronize();
  const auto* data = static_cast<const volatile float*>(tensor.const_data_ptr());
  EXPECT_EXIT(static_cast<void>(*data), ::testing::KilledBySignal(SIGSEGV), "");
  auto* written = static_cast<volatile float*>(tensor.mutable_data_ptr());
  EXPECT_EXIT(*written = 1, ::testing::KilledBySignal(SIGSEGV), "");
}

TEST_F(Device, KernelsEqualThoseOfTheHost) {
  const at::Tensor a = at::randn({4, 6}), b = at::randn({6, 5}), c = at::randn({4, 6});
  const at::Tensor x = a.to(tile), y = b.to(tile), z = c.to(tile);
  EXPECT_TRUE(at::equal((x + z).cpu(), a + c));
  EXPECT_TRUE(at::equal(x.matmul(y).cpu(), a.matmul(b)));
  EXPECT_TRUE(at::equal(x.t().softmax(0).cpu(), a.t().softmax(0)));
  EXPECT_TRUE(at::equal(x.sum(0).cpu(), a.sum(0)));
  EXPECT_TRUE(at::equal(std::get<1>(x.sort(1)).cpu(), std::get<1>(a.sort(1))));
  EXPECT_TRUE(at::equal(at::cat({x, z}, 1).cpu(), at::cat({a, c}, 1)));
  EXPECT_TRUE(at::equal(x.gt(0).nonzero().cpu(), a.gt(0).nonzero()));
  EXPECT_TRUE(at::equal(x.masked_select(x.gt(0)).cpu(), a.masked_select(a.gt(0))));
  EXPECT_TRUE(at::equal(at::arange(7, on_tile).cpu(), at::arange(7)));
  EXPECT_TRUE(at::equal(x.to(at::kDouble).cpu(), a.to(at::kDouble)));
  EXPECT_EQ(x.max().item<float>(), a.max().item<float>());
  const at::Tensor complex = at::complex(a, c), on_device = complex.to(tile);
  EXPECT_TRUE(at::equal(on_device.conj().mul(2).cpu(), complex.conj().mul(2)));
  EXPECT_TRUE(at::equal(on_device.conj().cpu(), complex.conj()));
  const at::Tensor images = at::randn({2, 3, 8, 8}), filters = at::randn({4, 3, 3, 3});
  EXPECT_TRUE(at::equal(at::conv2d(images.to(tile), filters.to(tile)).cpu(), at::conv2d(images, filters)));
}

TEST_F(Device, ViewsShareMemory) {
  const at::Tensor tensor = at::zeros({4, 6}, on_tile);
  EXPECT_TRUE(tensor.slice(0, 1, 3).t().is_alias_of(tensor));
  tensor.slice(0, 1, 3).t().fill_(2);
  tensor.view({2, 12}).select(0, 0).unfold(0, 2, 2).add_(1);
  at::Tensor expected = at::zeros({4, 6});
  expected.slice(0, 1, 3).fill_(2);
  expected.slice(0, 0, 2).add_(1);
  EXPECT_TRUE(at::equal(tensor.cpu(), expected));
  const at::Tensor parts = at::zeros({3}, on_tile.dtype(at::kComplexFloat));
  at::view_as_real(parts).select(1, 1).fill_(1);
  EXPECT_TRUE(at::equal(parts.cpu(), at::full({3}, c10::complex<float>(0, 1), at::kComplexFloat)));
}

TEST_F(Device, OutputsAreResized) {
  at::Tensor out = at::empty({0}, on_tile);
  const at::Tensor x = at::ones({2, 3}, on_tile);
  at::mul_out(out, x, x);
  EXPECT_EQ(out.sizes(), x.sizes());
  at::Tensor kept = at::ones({2}, on_tile);
  kept.resize_({4});
  EXPECT_TRUE(at::equal(kept.cpu().slice(0, 0, 2), at::ones({2})));
}

TEST_F(Device, Gradients) {
  const at::Tensor a = at::randn({4, 6}), b = at::randn({6, 5});
  const at::Tensor p = a.clone().requires_grad_(), q = b.clone().requires_grad_();
  const at::Tensor x = a.to(tile).requires_grad_(), y = b.to(tile).requires_grad_();
  p.matmul(q).relu().square().sum().backward();
  x.matmul(y).relu().square().sum().backward();
  EXPECT_TRUE(at::equal(x.grad().cpu(), p.grad()));
  EXPECT_TRUE(at::equal(y.grad().cpu(), q.grad()));
}

TEST_F(Device, RefusesTensorsOfTheHost) {
  const at::Tensor x = at::ones({2}, on_tile);
  EXPECT_THROW(x + at::ones({2}), c10::Error);
  EXPECT_THROW(x + at::ones({2}, on_tile.device(c10::Device("tile:1"))), c10::Error);
  EXPECT_NO_THROW(x + at::ones({}));
  EXPECT_THROW(at::equal(x, at::ones({2})), c10::Error);
  set_strict_comparisons(false);
  EXPECT_TRUE(at::equal(x, at::ones({2})));
  set_strict_comparisons(true);
}

TEST_F(Device, ErrorsAreThoseOfTheHost) {
  EXPECT_THROW(at::ones({2, 3}, on_tile).matmul(at::ones({2, 3}, on_tile)), c10::Error);
  EXPECT_THROW(at::ones({2, 3}, on_tile).index_select(0, at::tensor({5}).to(tile)), std::exception);
}

TEST_F(Device, CopiesToTheHostThatDoNotBlockComeLater) {
  const LagScope lag(1h);
  const at::Tensor x = at::full({3}, 7., on_tile);
  const at::Tensor host = at::zeros({3});
  host.copy_(x, /*non_blocking=*/true);
  EXPECT_TRUE(at::equal(host, at::zeros({3})));
  impl.synchronizeStream(impl.getStream(tile));
  EXPECT_TRUE(at::equal(host, at::full({3}, 7.)));
}

TEST_F(Device, ItsOwnThreadWorksToo) {
  const at::Tensor x = at::full({3}, 7., on_tile);
  const at::Tensor host = at::zeros({3});
  host.copy_(x, /*non_blocking=*/true);
  const c10::Stream stream = impl.getStream(tile);
  while (!impl.queryStream(stream)) std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(at::equal(host, at::full({3}, 7.)));
}

TEST_F(Device, StreamsDoNotWaitForOneAnother) {
  const LagScope lag(1h);
  const at::Tensor x = at::full({3}, 7., on_tile);
  at::Tensor early;
  {
    const c10::StreamGuard other(impl.getNewStream(tile));
    early = x.cpu();
  }
  EXPECT_TRUE(at::isnan(early).all().item<bool>());
  EXPECT_TRUE(at::equal(x.cpu(), at::full({3}, 7.)));
}

TEST_F(Device, EventsOrderStreams) {
  const LagScope lag(1h);
  const at::Tensor x = at::full({3}, 7., on_tile);
  c10::Event event(at::kPrivateUse1);
  event.record(impl.getStream(tile));
  EXPECT_FALSE(event.query());
  {
    const c10::StreamGuard other(impl.getNewStream(tile));
    event.block(impl.getStream(tile));
    EXPECT_TRUE(at::equal(x.cpu(), at::full({3}, 7.)));
  }
  EXPECT_TRUE(event.query());
}

TEST_F(Device, HasGeneratorsOfItsOwn) {
  const at::Generator of_host = at::globalContext().defaultGenerator(at::kCPU);
  const at::Tensor state = of_host.get_state();
  const at::Generator mine = at::globalContext().defaultGenerator(c10::Device("tile:0"));
  EXPECT_EQ(mine.current_seed(), 0);  // manual_seed reaches it
  const at::Tensor first = at::rand({8}, on_tile).cpu();
  EXPECT_GT(mine.get_offset(), 0);
  EXPECT_TRUE(at::equal(of_host.get_state(), state));
  EXPECT_FALSE(at::equal(at::rand({8}, on_tile).cpu(), first));
  at::manual_seed(0);
  EXPECT_TRUE(at::equal(at::rand({8}, on_tile).cpu(), first));
  EXPECT_THROW(at::rand({8}, of_host, on_tile), c10::Error);
}

TEST_F(Device, ThreadsHaveACurrentDevice) {
  const c10::DeviceGuard guard(c10::Device("tile:2"));
  EXPECT_EQ(at::ones({1}, on_tile).device().index(), 2);
  std::thread([&] { EXPECT_EQ(at::ones({1}, on_tile).device().index(), 0); }).join();
}

}  // namespace
}  // namespace tessera::testing::device
