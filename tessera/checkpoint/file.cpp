#include <tessera/checkpoint/file.h>
#include <tessera/error.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <dirent.h>
#include <fcntl.h>
#include <isa-l/crc.h>
#include <limits>
#include <memory>
#include <mutex>
#include <sys/file.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace tessera::checkpoint {

namespace {

using Fault = std::function<void(std::string_view, const std::string&)>;

std::atomic<bool> fault_is_set{false};
std::mutex fault_mutex;
std::shared_ptr<const Fault> file_fault;
std::atomic<int64_t> read_count{0};

/// Lets the fault act. Whether the system call may be made; if not, errno says how it failed.
bool allow_call(std::string_view call, const std::string& path) {
  if (!fault_is_set.load(std::memory_order_acquire)) return true;
  std::shared_ptr<const Fault> fault;
  {
    const std::lock_guard lock(fault_mutex);
    fault = file_fault;
  }
  if (!fault) return true;
  try {
    (*fault)(call, path);
  } catch (const SystemFailure& failure) {
    errno = failure.code;
    return false;
  }
  return true;
}

const char* way_out(int code) {
  switch (code) {
    case ENOSPC:
    case EDQUOT:
      return " Free space there, or choose a path on another file system.";
    case EACCES:
    case EPERM:
      return " Check the permissions of it and of its directory.";
    case EROFS:
      return " The file system is mounted read-only: choose another path.";
    case EMFILE:
    case ENFILE:
      return " Raise the limit of open files (ulimit -n).";
    case ENOENT:
      return " Check the path.";
    case ENAMETOOLONG:
      return " Choose a shorter path.";
    default:
      return "";
  }
}

[[noreturn]] void fail_with(int code, std::string_view tried, const std::string& path) {
  TESSERA_CHECK(false, "Could not ", tried, " ", path, ": ", std::generic_category().message(code), ".",
                way_out(code));
}

template <class Call>
auto retry(const Call& call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

/// Closes a descriptor when it goes.
struct Descriptor {
  explicit Descriptor(int value) : value(value) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (value >= 0) ::close(value);
  }
  int release() { return std::exchange(value, -1); }
  int value;
};

std::string_view without_slashes(std::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  return path;
}

/// Follows no links. Nothing, if there is nothing.
std::optional<struct stat> status_of(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) == 0) return status;
  if (errno != ENOENT && errno != ENOTDIR) fail_with(errno, "look at", path);
  return std::nullopt;
}

void sync_descriptor(int descriptor, const std::string& path, bool directory) {
  if (!allow_call("fsync", path) || retry([&] { return ::fsync(descriptor); }) != 0) {
    // Some network file systems keep no names back, and say so with EINVAL.
    if (directory && errno == EINVAL) return;
    fail_with(errno, "bring to the disk", path);
  }
}

/// Whether it was renamed; if not, errno says why.
bool rename_with(unsigned flags, const std::string& from, const std::string& to) {
  return allow_call((flags & RENAME_EXCHANGE) != 0 ? "exchange" : "rename", to) &&
         ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0;
}

bool is_unsupported(int code) { return code == EINVAL || code == ENOSYS || code == EOPNOTSUPP; }

/// Brings the names in `parent` to the disk. If that fails, nobody knows which of them are there: `undo`, so that what
/// the caller removes is not what a crash would bring back.
template <class Undo>
void sync_or_undo(const std::string& parent, const Undo& undo) {
  try {
    sync_directory(parent);
  } catch (...) {
    undo();
    throw;
  }
}

/// Where a file system cannot exchange names: the old one out of the way, the new one in its place.
void publish_in_steps(const std::string& fresh, const std::string& path, const std::string& previous) {
  const std::string parent = parent_of(path);
  if (!exists(path)) {
    if (!rename_with(0, fresh, path)) fail_with(errno, "publish the checkpoint as", path);
    sync_or_undo(parent, [&] { ::rename(path.c_str(), fresh.c_str()); });
    return;
  }
  remove_all(previous);
  if (!rename_with(0, path, previous)) fail_with(errno, "move the previous checkpoint away from", path);
  // Else a crash could leave the new name without the old one.
  try {
    sync_directory(parent);
    if (!rename_with(0, fresh, path)) fail_with(errno, "publish the checkpoint as", path);
  } catch (...) {
    ::rename(previous.c_str(), path.c_str());
    throw;
  }
  sync_or_undo(parent, [&] {
    ::rename(path.c_str(), fresh.c_str());
    ::rename(previous.c_str(), path.c_str());
  });
  if (!rename_with(0, previous, fresh)) fail_with(errno, "move the previous checkpoint to", fresh);
  sync_directory(parent);
}

/// Takes what is below the directory `descriptor` (which it closes) away.
void remove_content(int descriptor, const std::string& path) {
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::fdopendir(descriptor), ::closedir);
  if (!directory) {
    const int code = errno;
    ::close(descriptor);
    fail_with(code, "list", path);
  }
  while (true) {
    errno = 0;
    const dirent* entry = ::readdir(directory.get());
    if (!entry) break;
    const std::string name = entry->d_name;
    if (name == "." || name == "..") continue;
    const std::string child = c10::str(path, "/", name);
    if (!allow_call("unlink", child)) fail_with(errno, "remove", child);
    if (::unlinkat(descriptor, name.c_str(), 0) == 0 || errno == ENOENT) continue;
    // Linux says EISDIR of a directory, POSIX EPERM.
    if (errno != EISDIR && errno != EPERM) fail_with(errno, "remove", child);
    const int below = ::openat(descriptor, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (below < 0) {
      if (errno == ENOENT) continue;
      fail_with(errno, "remove", child);
    }
    remove_content(below, child);
    if (!allow_call("rmdir", child) ||
        (::unlinkat(descriptor, name.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT)) {
      fail_with(errno, "remove", child);
    }
  }
  if (errno != 0) fail_with(errno, "list", path);
}

}  // namespace

void set_file_fault(std::function<void(std::string_view call, const std::string& path)> fault) {
  const std::lock_guard lock(fault_mutex);
  file_fault = fault ? std::make_shared<const Fault>(std::move(fault)) : nullptr;
  fault_is_set.store(file_fault != nullptr, std::memory_order_release);
}

File::File(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}
File::File(File&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      written_(other.written_) {}
File& File::operator=(File&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(written_, other.written_);
  return *this;
}
File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

File File::open(const std::string& path) {
  // Not blocked by a named pipe, which is refused below.
  const int flags = O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
  Descriptor descriptor(retry([&] { return ::open(path.c_str(), flags); }));
  if (descriptor.value < 0) fail_with(errno, "open", path);
  struct stat status {};
  if (::fstat(descriptor.value, &status) != 0) fail_with(errno, "look at", path);
  TESSERA_CHECK(S_ISREG(status.st_mode), "Could not open ", path, ": it is ",
                S_ISDIR(status.st_mode) ? "a directory" : "no regular file", ".");
  return {path, descriptor.release()};
}

File File::create(const std::string& path) {
  if (!allow_call("create", path)) fail_with(errno, "create", path);
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOCTTY;
  const int descriptor = retry([&] { return ::open(path.c_str(), flags, 0666); });
  if (descriptor < 0) fail_with(errno, "create", path);
  return {path, descriptor};
}

File File::modify(const std::string& path) {
  const int descriptor = retry([&] { return ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY); });
  if (descriptor < 0) fail_with(errno, "open", path);
  return {path, descriptor};
}

int64_t File::size() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) fail_with(errno, "look at", path_);
  return status.st_size;
}

void File::read(int64_t offset, void* data, size_t size) const {
  TESSERA_CHECK(offset >= 0, "Could not read ", path_, " at the negative position ", offset, ".");
  auto* to = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t count = retry([&] { return ::pread(descriptor_, to, size, offset); });
    if (count < 0) fail_with(errno, "read", path_);
    TESSERA_CHECK(count > 0, "Could not read ", size, " bytes of ", path_, " at position ", offset,
                  ": the file has ", this->size(), " bytes. It was cut short, or is not the one meant.");
    read_count.fetch_add(count, std::memory_order_relaxed);
    to += count;
    offset += count;
    size -= static_cast<size_t>(count);
  }
}

void File::write(int64_t offset, const void* data, size_t size) {
  const auto* from = static_cast<const char*>(data);
  while (size > 0) {
    if (!allow_call("write", path_)) fail_with(errno, "write", path_);
    const ssize_t count = retry([&] { return ::pwrite(descriptor_, from, size, offset); });
    if (count < 0) fail_with(errno, "write", path_);
    from += count;
    offset += count;
    size -= static_cast<size_t>(count);
    begin_to_store(offset, count);
  }
}

void File::begin_to_store(int64_t end, int64_t count) {
  constexpr int64_t kBatch = int64_t{8} << 20;
  written_ += count;
  if (written_ < kBatch) return;
  // A hint: what fails shows in `sync`.
  (void)::sync_file_range(descriptor_, std::max<int64_t>(end - written_, 0), written_, SYNC_FILE_RANGE_WRITE);
  written_ = 0;
}

void File::sync() { sync_descriptor(descriptor_, path_, /*directory=*/false); }

void File::close() {
  // Linux closes it even if it says EINTR.
  if (::close(std::exchange(descriptor_, -1)) != 0 && errno != EINTR) fail_with(errno, "close", path_);
}

std::string read_file(const std::string& path, int64_t limit) {
  const File file = File::open(path);
  const int64_t size = file.size();
  TESSERA_CHECK(size <= limit, "Could not read ", path, ": it has ", size, " bytes, more than the ", limit,
                " that such a file may have.");
  std::string content(static_cast<size_t>(size), '\0');
  file.read(0, content.data(), content.size());
  return content;
}

bool exists(const std::string& path) { return status_of(path).has_value(); }

bool is_directory(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0) return S_ISDIR(status.st_mode);
  if (errno != ENOENT && errno != ENOTDIR) fail_with(errno, "look at", path);
  return false;
}

std::vector<std::string> list_directory(const std::string& path) {
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(path.c_str()), ::closedir);
  if (!directory) fail_with(errno, "list", path);
  std::vector<std::string> names;
  while (true) {
    errno = 0;
    const dirent* entry = ::readdir(directory.get());
    if (!entry) break;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  if (errno != 0) fail_with(errno, "list", path);
  std::ranges::sort(names);
  return names;
}

void make_directory(const std::string& path) {
  if (!allow_call("mkdir", path) || ::mkdir(path.c_str(), 0777) != 0) {
    fail_with(errno, "make the directory", path);
  }
}

void make_directories(const std::string& path) {
  if (is_directory(path)) return;
  const std::string parent = parent_of(path);
  if (parent != path) make_directories(parent);
  if (!allow_call("mkdir", path) || (::mkdir(path.c_str(), 0777) != 0 && errno != EEXIST)) {
    fail_with(errno, "make the directory", path);
  }
  sync_directory(parent);
}

void sync_directory(const std::string& path) {
  const Descriptor descriptor(
      retry([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  if (descriptor.value < 0) fail_with(errno, "open", path);
  sync_descriptor(descriptor.value, path, /*directory=*/true);
}

void remove_all(const std::string& path) {
  const auto status = status_of(path);
  if (!status) return;
  if (!S_ISDIR(status->st_mode)) {
    if (!allow_call("unlink", path) || (::unlink(path.c_str()) != 0 && errno != ENOENT)) {
      fail_with(errno, "remove", path);
    }
    return;
  }
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (descriptor < 0) {
    if (errno == ENOENT) return;
    fail_with(errno, "remove", path);
  }
  remove_content(descriptor, path);
  if (!allow_call("rmdir", path) || (::rmdir(path.c_str()) != 0 && errno != ENOENT)) {
    fail_with(errno, "remove", path);
  }
}

std::string parent_of(const std::string& path) {
  const std::string_view trimmed = without_slashes(path);
  const size_t slash = trimmed.rfind('/');
  if (slash == std::string_view::npos) return ".";
  if (slash == 0) return "/";
  return std::string(without_slashes(trimmed.substr(0, slash)));
}

std::string beside(const std::string& path, std::string_view suffix) {
  const std::string_view trimmed = without_slashes(path);
  const std::string_view name = trimmed.substr(trimmed.rfind('/') + 1);
  TESSERA_CHECK_VALUE(!name.empty() && name != "." && name != "..", "'", path,
                      "' does not end with the name of a directory. Choose a path that does, like "
                      "'checkpoints/step_100'.");
  return c10::str(parent_of(path), "/.", name, suffix);
}

std::string path_in(const std::string& directory, const std::string& name, const std::string& source) {
  bool good = name.find('\0') == std::string::npos;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('/', begin), name.size());
    const std::string_view component = std::string_view(name).substr(begin, end - begin);
    good = good && !component.empty() && component != "." && component != "..";
    begin = end + 1;
  }
  TESSERA_CHECK(good, source, " names the file '", name.c_str(),
                "', which does not lie in the checkpoint's directory. It is damaged, or not to be trusted.");
  return c10::str(directory, "/", name);
}

void publish(const std::string& fresh, const std::string& path) {
  const std::string parent = parent_of(path);
  TESSERA_CHECK_VALUE(parent_of(fresh) == parent, "Cannot publish ", fresh, " as ", path,
                      ": they must lie in the same directory.");
  const std::string previous = beside(path, ".previous");
  if (rename_with(RENAME_NOREPLACE, fresh, path)) {
    sync_or_undo(parent, [&] { ::rename(path.c_str(), fresh.c_str()); });
  } else if (is_unsupported(errno)) {
    publish_in_steps(fresh, path, previous);
  } else if (errno != EEXIST) {
    fail_with(errno, "publish the checkpoint as", path);
  } else if (rename_with(RENAME_EXCHANGE, fresh, path)) {
    sync_or_undo(parent,
                 [&] { ::renameat2(AT_FDCWD, fresh.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE); });
  } else {
    if (!is_unsupported(errno)) fail_with(errno, "publish the checkpoint as", path);
    publish_in_steps(fresh, path, previous);
  }
  // What a process that ended between two steps left is older than what was just published.
  remove_all(previous);
}

std::string resolve_checkpoint(const std::string& path) {
  if (exists(path)) return path;
  const std::string previous = beside(path, ".previous");
  return exists(previous) ? previous : path;
}

Identity::Identity(std::array<int64_t, 4> numbers, int descriptor)
    : numbers_(numbers), descriptor_(descriptor) {}
Identity::Identity(Identity&& other) noexcept
    : numbers_(other.numbers_), descriptor_(std::exchange(other.descriptor_, -1)) {}
Identity& Identity::operator=(Identity&& other) noexcept {
  std::swap(numbers_, other.numbers_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}
Identity::~Identity() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Identity Identity::of(const std::string& path) {
  Descriptor descriptor(retry([&] { return ::open(path.c_str(), O_PATH | O_CLOEXEC); }));
  if (descriptor.value < 0) fail_with(errno, "look at", path);
  struct stat status {};
  if (::fstat(descriptor.value, &status) != 0) fail_with(errno, "look at", path);
  return {{static_cast<int64_t>(status.st_dev), static_cast<int64_t>(status.st_ino), status.st_ctim.tv_sec,
           status.st_ctim.tv_nsec},
          descriptor.release()};
}

DirectoryLock::DirectoryLock(std::string file, int descriptor)
    : file_(std::move(file)), descriptor_(descriptor) {}
DirectoryLock::DirectoryLock(DirectoryLock&& other) noexcept
    : file_(std::move(other.file_)), descriptor_(std::exchange(other.descriptor_, -1)) {}
DirectoryLock& DirectoryLock::operator=(DirectoryLock&& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}
DirectoryLock::~DirectoryLock() {
  if (descriptor_ < 0) return;
  // First the name, then the lock: who opened the file in between sees below that it is not the one by that name.
  ::unlink(file_.c_str());
  // Also if a child of this process has inherited the descriptor.
  ::flock(descriptor_, LOCK_UN);
  ::close(descriptor_);
}

std::optional<DirectoryLock> DirectoryLock::try_take(const std::string& path) {
  const std::string file = beside(path, ".lock");
  while (true) {
    if (!allow_call("create", file)) fail_with(errno, "lock", file);
    const int flags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    Descriptor descriptor(retry([&] { return ::open(file.c_str(), flags, 0666); }));
    if (descriptor.value < 0) fail_with(errno, "lock", file);
    if (retry([&] { return ::flock(descriptor.value, LOCK_EX | LOCK_NB); }) != 0) {
      if (errno == EWOULDBLOCK) return std::nullopt;
      fail_with(errno, "lock", file);
    }
    // Whoever had it before may have removed the file since it was opened here: then it locks nothing.
    struct stat mine {};
    if (::fstat(descriptor.value, &mine) != 0) fail_with(errno, "lock", file);
    const auto named = status_of(file);
    if (named && named->st_dev == mine.st_dev && named->st_ino == mine.st_ino) {
      return DirectoryLock(file, descriptor.release());
    }
  }
}

int64_t bytes_read() { return read_count.load(std::memory_order_relaxed); }

uint32_t crc32c(const void* data, size_t size, uint32_t before) {
  // ISA-L takes, but does not change, a pointer to mutable bytes, and counts them in an int.
  auto* from = static_cast<unsigned char*>(const_cast<void*>(data));
  uint32_t state = ~before;
  while (size > 0) {
    const auto count = std::min<size_t>(size, std::numeric_limits<int>::max());
    state = crc32_iscsi(from, static_cast<int>(count), state);
    from += count;
    size -= count;
  }
  return ~state;
}

}  // namespace tessera::checkpoint
