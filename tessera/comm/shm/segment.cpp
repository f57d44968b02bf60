#include <tessera/comm/host.h>
#include <tessera/comm/shm/segment.h>
#include <tessera/error.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera::shm {

namespace {

using Clock = std::chrono::steady_clock;

/// A file descriptor that is closed.
class Descriptor {
 public:
  Descriptor(int number, const char* what) : number_(number) {
    TESSERA_CHECK(number >= 0, "Processes cannot share memory: ", what, " fails: ", std::strerror(errno),
                  ". Use the backend \"gloo\".");
  }
  ~Descriptor() { ::close(number_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  operator int() const { return number_; }

 private:
  const int number_;
};

size_t aligned(size_t bytes) {
  constexpr size_t kPage = 4096;
  return (bytes + kPage - 1) / kPage * kPage;
}

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

/// Throws unless all members are where this one is.
void check_one_host(const BackendRequest& request) {
  const std::string mine = memory_host();
  const auto key = [](size_t member) { return "host/" + std::to_string(member); };
  request.store->set(key(request.member), bytes_of(mine));
  for (size_t i = 0; i < request.ranks.size(); ++i) {
    const auto other = request.store->get(key(i));
    TESSERA_CHECK(std::string(other.begin(), other.end()) == mine,
                  "The backend \"shm\" connects processes that can share memory, but rank ",
                  request.ranks[request.member], " and rank ", request.ranks[i],
                  " cannot: they are on different hosts, or in different network namespaces, or of different "
                  "users. Use \"gloo\" between them.");
  }
}

/// The addresses of sockets whose names are in no file system.
struct Address {
  sockaddr_un value{};
  socklen_t length = sizeof(sa_family_t);

  Address() { value.sun_family = AF_UNIX; }
  explicit Address(const std::vector<uint8_t>& name) : Address() {
    const size_t size = std::min(name.size(), sizeof value.sun_path);
    std::memcpy(value.sun_path, name.data(), size);
    length += static_cast<socklen_t>(size);
  }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&value); }
  std::vector<uint8_t> name() const {
    return {value.sun_path, value.sun_path + (length - sizeof(sa_family_t))};
  }
};

/// Room for one descriptor beside a message.
struct Passing {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  char letter = 0;
  iovec part{&letter, 1};
  msghdr message{};

  Passing() {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
  }
};

/// What `call` of the system returns, which is called again if a signal interrupts it.
template <class Call>
auto uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

void send_descriptor(int socket, int descriptor) {
  Passing passing;
  cmsghdr* head = CMSG_FIRSTHDR(&passing.message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof descriptor);
  std::memcpy(CMSG_DATA(head), &descriptor, sizeof descriptor);
  uninterrupted([&] { return ::sendmsg(socket, &passing.message, MSG_NOSIGNAL); });
}

int receive_descriptor(int socket) {
  Passing passing;
  if (uninterrupted([&] { return ::recvmsg(socket, &passing.message, MSG_CMSG_CLOEXEC); }) != 1) return -1;
  const cmsghdr* head = CMSG_FIRSTHDR(&passing.message);
  if (!head || head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) return -1;
  int descriptor = -1;
  std::memcpy(&descriptor, CMSG_DATA(head), sizeof descriptor);
  return descriptor;
}

bool is_of_this_user(int socket) {
  ucred who{};
  socklen_t length = sizeof who;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &length) == 0 && who.uid == ::geteuid();
}

bool wait_for_input(int socket, Clock::time_point deadline) {
  pollfd look{socket, POLLIN, 0};
  return uninterrupted([&] {
           const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
           return ::poll(&look, 1, static_cast<int>(std::clamp<int64_t>(left, 0, INT_MAX)));
         }) > 0;
}

std::string here(int64_t member) { return "here/" + std::to_string(member); }

/// Hands the file to each of the other members.
void hand_out(int file, const BackendRequest& request, Clock::time_point deadline) {
  const Descriptor listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), "socket");
  Address address;  // the system chooses a name
  const auto size = static_cast<int>(request.ranks.size());
  TESSERA_CHECK(::bind(listener, address.get(), address.length) == 0 && ::listen(listener, size) == 0,
                "Processes cannot share memory: a local socket cannot be made: ", std::strerror(errno));
  address.length = sizeof address.value;
  ::getsockname(listener, address.get(), &address.length);
  request.store->set("socket", address.name());
  // Waits for the store end when the world fails; waits for the socket do not. So they come here first.
  for (int i = 1; i < size; ++i) request.store->get(here(i));
  for (int served = 1; served < size;) {
    TESSERA_CHECK(wait_for_input(listener, deadline), "Rank ", request.ranks[request.member],
                  " timed out while it made the group ", request.name, ": ", size - served,
                  " of its members did not come for the memory that they share.");
    const Descriptor connection(
        uninterrupted([&] { return ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC); }), "accept");
    if (!is_of_this_user(connection)) continue;
    send_descriptor(connection, file);  // if it has died, others find out
    ++served;
  }
  // Another group of this name, later, begins anew.
  request.store->deleteKey("socket");
  for (int i = 1; i < size; ++i) request.store->deleteKey(here(i));
}

int fetch_file(const BackendRequest& request, Clock::time_point deadline) {
  Address address(request.store->get("socket"));
  const Descriptor connection(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), "socket");
  TESSERA_CHECK(uninterrupted([&] { return ::connect(connection, address.get(), address.length); }) == 0 &&
                    is_of_this_user(connection),
                "Rank ", request.ranks[request.member], " cannot reach rank ", request.ranks[0],
                ", which has the memory that the group ", request.name, " shares: ", std::strerror(errno));
  request.store->set(here(request.member), bytes_of("yes"));
  TESSERA_CHECK(wait_for_input(connection, deadline), "Rank ", request.ranks[request.member],
                " timed out while it made the group ", request.name, ": rank ", request.ranks[0],
                " did not hand out the memory that they share.");
  return receive_descriptor(connection);
}

}  // namespace

Segment::Segment(const BackendRequest& request) : members_(static_cast<int64_t>(request.ranks.size())) {
  const auto count = static_cast<size_t>(members_);
  members_at_ = aligned(sizeof(GroupBlock));
  stages_at_ = members_at_ + count * aligned(sizeof(MemberBlock));
  results_at_ = stages_at_ + count * 2 * kStageBytes;
  channels_at_ = results_at_ + 2 * kStageBytes;
  bytes_ = channels_at_ + count * count * aligned(sizeof(Channel));

  const auto deadline = Clock::now() + request.timeout;
  if (members_ > 1) check_one_host(request);
  if (request.member == 0) {
    const Descriptor file(::memfd_create("tessera", MFD_CLOEXEC), "memfd_create");
    TESSERA_CHECK(::ftruncate(file, static_cast<off_t>(bytes_)) == 0, "Processes cannot share ", bytes_,
                  " bytes of memory: ", std::strerror(errno), ". Use the backend \"gloo\".");
    if (members_ > 1) hand_out(file, request, deadline);
    map(file);
  } else {
    const Descriptor file(fetch_file(request, deadline), "receiving a file");
    struct stat state {};
    TESSERA_CHECK(::fstat(file, &state) == 0 && static_cast<size_t>(state.st_size) == bytes_,
                  "The memory that rank ", request.ranks[0], " shares has ", state.st_size,
                  " bytes, but rank ", request.ranks[request.member], " expects ", bytes_,
                  ": the processes run different versions of Tessera.");
    map(file);
  }
}

void Segment::map(int file) {
  void* data = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  TESSERA_CHECK(data != MAP_FAILED, "Processes cannot share ", bytes_,
                " bytes of memory: ", std::strerror(errno), ". Use the backend \"gloo\".");
  data_ = static_cast<std::byte*>(data);
}

Segment::~Segment() {
  if (data_) ::munmap(data_, bytes_);
}

MemberBlock& Segment::member(int64_t member) const {
  return *at<MemberBlock>(members_at_ + static_cast<size_t>(member) * aligned(sizeof(MemberBlock)));
}

Channel& Segment::channel(int64_t from, int64_t to) const {
  return *at<Channel>(channels_at_ + static_cast<size_t>(from * members_ + to) * aligned(sizeof(Channel)));
}

std::byte* Segment::staged(int64_t member, uint64_t step) const {
  return at<std::byte>(stages_at_ + (static_cast<size_t>(member) * 2 + step % 2) * kStageBytes);
}

std::byte* Segment::results(uint64_t step) const {
  return at<std::byte>(results_at_ + step % 2 * kStageBytes);
}

}  // namespace tessera::shm
