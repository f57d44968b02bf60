#pragma once

#include <tessera/bytes.h>
#include <tessera/checkpoint/catalog.h>

#include <string>
#include <string_view>

/// What ranks send each other of catalogs.
namespace tessera::checkpoint {

void put_path(ByteWriter& out, const Path& path);
Path get_path(ByteReader& in);
c10::ScalarType get_dtype(ByteReader& in);
void put_chunk(ByteWriter& out, const Chunk& chunk);
Chunk get_chunk(ByteReader& in);

std::string to_bytes(const Catalog& catalog);
Catalog catalog_from_bytes(std::string_view bytes);

}  // namespace tessera::checkpoint
