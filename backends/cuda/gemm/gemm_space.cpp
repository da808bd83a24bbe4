#include "gemm/gemm_space.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "gemm/cublaslt.hpp"

namespace te_fl::cuda {
namespace {

// Maps an algorithm attribute that is read or set here to the type of its value.
template <cublasLtMatmulAlgoConfigAttributes_t attribute>
struct Attribute {
  using Type = uint32_t;
};
template <>
struct Attribute<CUBLASLT_ALGO_CONFIG_ID> {
  using Type = int32_t;
};
template <>
struct Attribute<CUBLASLT_ALGO_CONFIG_SPLITK_NUM> {
  using Type = int32_t;
};
template <>
struct Attribute<CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID> {
  using Type = uint16_t;
};
template <>
struct Attribute<CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID> {
  using Type = uint16_t;
};

template <cublasLtMatmulAlgoConfigAttributes_t attribute>
auto get(const cublasLtMatmulAlgo_t& algo) {
  typename Attribute<attribute>::Type value{};
  size_t written = 0;
  cublaslt()->algo_get(&algo, attribute, &value, sizeof value, &written);
  return value;
}
template <cublasLtMatmulAlgoConfigAttributes_t attribute, class T>
bool set(cublasLtMatmulAlgo_t& algo, T number) {
  const auto value = static_cast<typename Attribute<attribute>::Type>(number);
  return cublaslt()->algo_set(&algo, attribute, &value, sizeof value) == CUBLAS_STATUS_SUCCESS;
}

bool varies(const cublasLtMatmulAlgo_t& algo) {
  return get<CUBLASLT_ALGO_CONFIG_SPLITK_NUM>(algo) <= 1 &&
         get<CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME>(algo) == CUBLASLT_REDUCTION_SCHEME_NONE;
}

bool same_kind(const cublasLtMatmulAlgo_t& a, const cublasLtMatmulAlgo_t& b) {
  return get<CUBLASLT_ALGO_CONFIG_ID>(a) == get<CUBLASLT_ALGO_CONFIG_ID>(b) &&
         get<CUBLASLT_ALGO_CONFIG_STAGES_ID>(a) == get<CUBLASLT_ALGO_CONFIG_STAGES_ID>(b) &&
         get<CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID>(a) == get<CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID>(b);
}

// Returns the algorithms from which variations are derived: the first of each cuBLASLt algorithm id
// among the candidates, at most two.
std::vector<cublasLtMatmulAlgo_t> bases(const std::vector<cublasLtMatmulAlgo_t>& candidates) {
  constexpr size_t kMost = 2;
  std::vector<cublasLtMatmulAlgo_t> result;
  for (const cublasLtMatmulAlgo_t& algo : candidates) {
    const bool known = std::any_of(result.begin(), result.end(),
                                   [&](const auto& other) { return same_kind(algo, other); });
    if (!known && result.size() < kMost && varies(algo)) result.push_back(algo);
  }
  return result;
}

}  // namespace

void add_variations(const LibraryProduct& p, std::vector<cublasLtMatmulAlgo_t>& candidates) {
  const CublasLt& lt = *cublaslt();
  if (lt.number < kOldestWithTiles) return;
  for (const cublasLtMatmulAlgo_t& base : bases(candidates)) {
    for (const auto tile : kTiles) {
      for (const auto cluster : kClusters) {
        for (int option = 0; option < kCustomOptions; ++option) {
          cublasLtMatmulAlgo_t algo = base;
          cublasLtMatmulHeuristicResult_t result{};
          if (set<CUBLASLT_ALGO_CONFIG_TILE_ID>(algo, tile) &&
              set<CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID>(algo, cluster) &&
              set<CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION>(algo, option) &&
              lt.algo_check(p.handle, p.desc, p.left, p.right, p.added, p.out, &algo, &result) ==
                  CUBLAS_STATUS_SUCCESS &&
              result.workspaceSize <= p.workspace) {
            add_new(candidates, algo);
          }
        }
      }
    }
  }
}

void add_new(std::vector<cublasLtMatmulAlgo_t>& list, const cublasLtMatmulAlgo_t& algo) {
  for (const cublasLtMatmulAlgo_t& known : list) {
    if (std::memcmp(&known, &algo, sizeof algo) == 0) return;
  }
  list.push_back(algo);
}

std::string to_text(const cublasLtMatmulAlgo_t& algo) {
  std::string text;
  const auto add = [&](const char* name, auto value) {
    if (!text.empty()) text += ' ';
    text += name;
    text += ' ';
    text += std::to_string(value);
  };
  add("id", get<CUBLASLT_ALGO_CONFIG_ID>(algo));
  add("tile", get<CUBLASLT_ALGO_CONFIG_TILE_ID>(algo));
  add("stages", get<CUBLASLT_ALGO_CONFIG_STAGES_ID>(algo));
  add("custom", get<CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION>(algo));
  add("inner", get<CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID>(algo));
  add("cluster", get<CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID>(algo));
  add("splitk", get<CUBLASLT_ALGO_CONFIG_SPLITK_NUM>(algo));
  return text;
}

}  // namespace te_fl::cuda
