// Weights from their files straight into shared memory.
#pragma once
#include "device/metal/gpu.hpp"

namespace lily::metal {

// Each range at a 256-byte boundary of a few large buffers, read by several threads with the file cache bypassed. progress(bytes done) is called on the
// calling thread and may throw to stop. CheckpointError for a file that is not what its header promised; OutOfMemoryError before anything is read.
std::vector<Binding> load_weights(const std::shared_ptr<Gpu>& gpu, const std::vector<FileRange>& ranges, const LoadProgress& progress);

}  // namespace lily::metal
