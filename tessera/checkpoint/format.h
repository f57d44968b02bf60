#pragma once

namespace tessera::checkpoint {

/// docs/checkpoint.md
enum class Format {
  Tessera,      // sharded safetensors files and index.json
  HuggingFace,  // safetensors files of global tensors, with or without model.safetensors.index.json
  DCP,          // what torch.distributed.checkpoint writes: .metadata and *.distcp
};

}  // namespace tessera::checkpoint
