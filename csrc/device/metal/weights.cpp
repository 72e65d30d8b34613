#include "device/metal/weights.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <fcntl.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

#include "base/error.hpp"
#include "base/thread.hpp"

namespace lily::metal {
namespace {

constexpr uint64_t kAlign = 256;            // of every tensor: kernels read codes 16 bytes at once
constexpr uint64_t kArena = 1ull << 30;     // of one buffer: offsets stay far below the 2 GiB at which some tools have erred
constexpr uint64_t kBlock = 8ull << 20;     // of one read, at page boundaries of the file: only such reads go past the file cache
constexpr unsigned kReaders = 8;

class File {
 public:
  explicit File(const FileRange& r) : path_(r.file) {
    fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd_ < 0) throw CheckpointError(path_, std::strerror(errno), "a readable file");
    struct stat info;
    const bool regular = ::fstat(fd_, &info) == 0 && S_ISREG(info.st_mode);
    if (!regular || uint64_t(info.st_size) != r.file_bytes) {
      ::close(fd_);
      throw CheckpointError(path_, regular ? std::to_string(info.st_size) + " bytes" : "not a regular file", std::to_string(r.file_bytes) + " bytes");
    }
#if defined(F_NOCACHE)
    ::fcntl(fd_, F_NOCACHE, 1);
#endif
  }
  ~File() { ::close(fd_); }
  File(const File&) = delete;

  void read(uint8_t* out, uint64_t bytes, uint64_t offset) const {
    for (uint64_t done = 0; done < bytes;) {
      const ssize_t n = ::pread(fd_, out + done, bytes - done, off_t(offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) throw CheckpointError(path_, n == 0 ? "the end of the file at byte " + std::to_string(offset + done) : std::strerror(errno), "bytes up to " + std::to_string(offset + bytes));
      done += uint64_t(n);
    }
  }

 private:
  std::string path_;
  int fd_;
};

// One range and where its bytes go.
struct Placed {
  uint64_t offset, bytes;
  uint8_t* target;
};

// A block of a file, and the ranges that it meets: [first, last) of the file's, sorted by offset.
struct Job {
  const File* file;
  const std::vector<Placed>* ranges;
  uint64_t begin, end;
  size_t first, last;
};

void run(const Job& job, uint8_t* block) {
  job.file->read(block, job.end - job.begin, job.begin);
  for (size_t i = job.first; i < job.last; i++) {
    const Placed& p = (*job.ranges)[i];
    const uint64_t begin = std::max(job.begin, p.offset), end = std::min(job.end, p.offset + p.bytes);
    if (begin < end) std::memcpy(p.target + (begin - p.offset), block + (begin - job.begin), end - begin);
  }
}

std::vector<Binding> place(const std::shared_ptr<Gpu>& gpu, const std::vector<FileRange>& ranges) {
  std::vector<Binding> out(ranges.size());
  const uint64_t largest = std::min(kArena, gpu->limits().max_buffer / kPage * kPage);
  for (size_t i = 0; i < ranges.size();) {
    uint64_t size = 0;
    size_t end = i;
    std::vector<uint64_t> offsets;
    for (; end < ranges.size(); end++) {
      const uint64_t start = (size + kAlign - 1) / kAlign * kAlign;
      if (end > i && start + ranges[end].bytes > largest) break;
      offsets.push_back(start);
      size = start + ranges[end].bytes;
    }
    auto arena = std::make_shared<MetalBuffer>(gpu, size);
    for (size_t k = i; k < end; k++) out[k] = {arena, offsets[k - i]};
    i = end;
  }
  return out;
}

}  // namespace

std::vector<Binding> load_weights(const std::shared_ptr<Gpu>& gpu, const std::vector<FileRange>& ranges, const LoadProgress& progress) {
  std::map<std::string, std::unique_ptr<File>> files;
  std::map<std::string, std::vector<Placed>> placed;
  for (const FileRange& r : ranges) {
    if (r.offset > r.file_bytes || r.bytes > r.file_bytes - r.offset)
      throw CheckpointError(r.file, "bytes up to " + std::to_string(r.offset + r.bytes), "a range within the file's " + std::to_string(r.file_bytes));
    auto& file = files[r.file];
    if (!file) file = std::make_unique<File>(r);
  }
  std::vector<Binding> bindings = place(gpu, ranges);
  for (size_t i = 0; i < ranges.size(); i++) placed[ranges[i].file].push_back({ranges[i].offset, ranges[i].bytes, bindings[i].buffer->host() + bindings[i].offset});

  std::vector<Job> jobs;
  for (auto& [path, list] : placed) {
    std::sort(list.begin(), list.end(), [](const Placed& a, const Placed& b) { return a.offset < b.offset; });
    uint64_t file_end = 0;
    for (const FileRange& r : ranges)
      if (r.file == path) file_end = r.file_bytes;
    size_t first = 0;
    uint64_t longest = 0;  // ranges may share bytes: the end of the furthest so far
    for (const Placed& p : list) longest = std::max(longest, p.offset + p.bytes);
    for (uint64_t begin = list.front().offset / kPage * kPage; begin < longest; begin += kBlock) {
      const uint64_t end = std::min(begin + kBlock, file_end);
      while (first < list.size() && list[first].offset + list[first].bytes <= begin) first++;
      size_t last = first;
      bool wanted = false;
      for (; last < list.size() && list[last].offset < end; last++) wanted = wanted || list[last].offset + list[last].bytes > begin;
      if (wanted) jobs.push_back({files[path].get(), &list, begin, end, first, last});
    }
  }

  std::atomic<size_t> next{0};
  std::atomic<uint64_t> done{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::condition_variable changed;
  std::exception_ptr failure;
  unsigned running = 0;
  auto work = [&] {
    try {
      std::unique_ptr<uint8_t, void (*)(void*)> block(static_cast<uint8_t*>(std::aligned_alloc(kPage, kBlock)), std::free);
      if (!block) throw OutOfMemoryError("a block to read the weights through", kBlock, 0, "close other programs");
      for (size_t i; !stop && (i = next.fetch_add(1)) < jobs.size();) {
        run(jobs[i], block.get());
        done += jobs[i].end - jobs[i].begin;
      }
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex);
      if (!failure) failure = std::current_exception();
      stop = true;
    }
    std::lock_guard<std::mutex> lock(mutex);
    running--;
    changed.notify_all();
  };
  std::vector<Thread> threads;
  std::exception_ptr thrown;
  try {
    for (size_t t = 0; t < std::min<size_t>(kReaders, jobs.size()); t++) {
      {
        std::lock_guard<std::mutex> lock(mutex);
        running++;
      }
      try {
        threads.emplace_back(work);
      } catch (const DeviceError&) {
        std::lock_guard<std::mutex> lock(mutex);
        running--;
        if (threads.empty()) throw;
        break;  // those that there are do the work
      }
    }
    std::unique_lock<std::mutex> lock(mutex);
    while (running) {
      changed.wait_for(lock, std::chrono::milliseconds(50));
      lock.unlock();
      if (progress) progress(done);
      lock.lock();
    }
  } catch (...) {
    thrown = std::current_exception();
    stop = true;
  }
  for (Thread& t : threads) t.join();
  if (thrown) std::rethrow_exception(thrown);
  if (failure) std::rethrow_exception(failure);
  return bindings;
}

}  // namespace lily::metal
