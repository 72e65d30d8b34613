// A session's contents as plain bytes, for a file, and back.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/session.hpp"

namespace lily {

struct SessionImage {
  struct Point {
    uint32_t position;
    uint32_t state;  // index in states
    bool marked;
  };
  std::vector<int32_t> tokens;
  std::vector<uint8_t> origins;
  uint32_t consumed = 0;
  using Bytes = std::span<const uint8_t>;
  std::vector<Bytes> states;  // distinct state values; the last one is the current state, when tokens were consumed
  std::vector<Point> snapshots;
  std::vector<Bytes> kv;  // per attention layer K, then V: whole blocks in order, rows past the last token zero
  std::vector<std::shared_ptr<const void>> owners;  // keep the bytes alive
};

SessionImage export_session(Session& session);
// InvalidArgument when sizes or positions do not fit the model; nothing is changed then.
std::shared_ptr<Session> import_session(const std::shared_ptr<Engine>& engine, const SessionImage& image);

}  // namespace lily
