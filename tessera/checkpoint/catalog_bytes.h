#pragma once

#include <tessera/checkpoint/catalog.h>
#include <tessera/bytes.h>

#include <string>
#include <string_view>

/// What ranks send each other of catalogs.
namespace tessera::checkpoint {

void put_path(ByteWriter& out, const Path& path);
Path get_path(ByteReader& in);
void put_chunk(ByteWriter& out, const Chunk& chunk);
Chunk get_chunk(ByteReader& in);

std::string to_bytes(const Catalog& catalog);
Catalog catalog_from_bytes(std::string_view bytes);

}  // namespace tessera::checkpoint
