// A file mapped read-only. Weights stay in place in the page cache; nothing is copied.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace lily {

class MappedFile {
 public:
  // Throws CheckpointError when the file cannot be opened or is not `expected_bytes` long (it was cut or replaced since its header was read).
  static std::shared_ptr<MappedFile> open(const std::string& path, uint64_t expected_bytes);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const uint8_t* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  const std::string& path() const { return path_; }

 private:
  MappedFile(std::string path, const uint8_t* data, uint64_t bytes) : path_(std::move(path)), data_(data), bytes_(bytes) {}
  std::string path_;
  const uint8_t* data_;
  uint64_t bytes_;
};

}  // namespace lily
