#include "base/mapped_file.hpp"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.hpp"

namespace lily {

std::shared_ptr<MappedFile> MappedFile::open(const std::string& path, uint64_t expected_bytes) {
  int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw CheckpointError(path, std::strerror(errno), "a readable file");
  struct stat info;
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    throw CheckpointError(path, "not a regular file", "a safetensors file");
  }
  uint64_t bytes = uint64_t(info.st_size);
  if (bytes != expected_bytes || bytes == 0) {
    ::close(fd);
    throw CheckpointError(path, std::to_string(bytes) + " bytes", std::to_string(expected_bytes) + " bytes");
  }
  void* p = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
  ::close(fd);
  if (p == MAP_FAILED) throw CheckpointError(path, std::strerror(errno), "a file that can be mapped");
  return std::shared_ptr<MappedFile>(new MappedFile(path, static_cast<const uint8_t*>(p), bytes));
}

MappedFile::~MappedFile() { ::munmap(const_cast<uint8_t*>(data_), bytes_); }

}  // namespace lily
