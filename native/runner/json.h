// A strict JSON parser for manifests and headers (RFC 8259, no duplicate keys, limited depth).
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>
#include "failure.h"

namespace bitport::runner {

class Json;
using JsonArray = std::vector<Json>;
using JsonObject = std::vector<std::pair<std::string, Json>>;   // in file order

class Json {
 public:
  using Held = std::variant<std::nullptr_t, bool, int64_t, double, std::string, JsonArray, JsonObject>;

  static Json parse(std::string_view text, const std::string& where);

  Json() = default;
  template <typename Value>   // one of the alternatives; a template, since g++ 12 warns of moved variants
  explicit Json(Value value) : held_(std::move(value)) {}

  bool is_null() const { return std::holds_alternative<std::nullptr_t>(held_); }
  bool is_text() const { return std::holds_alternative<std::string>(held_); }
  bool is_list() const { return std::holds_alternative<JsonArray>(held_); }
  // The value as a type, or a Failure; ``what`` names the value in its message.
  const std::string& text(const std::string& what) const { return get<std::string>(what, "a string"); }
  int64_t number(const std::string& what) const { return get<int64_t>(what, "a whole number"); }
  bool truth(const std::string& what) const { return get<bool>(what, "true or false"); }
  double real(const std::string& what) const;
  const JsonArray& array(const std::string& what) const { return get<JsonArray>(what, "an array"); }
  const JsonObject& object(const std::string& what) const { return get<JsonObject>(what, "an object"); }
  // A non-negative number.
  uint64_t size(const std::string& what) const;
  std::vector<int64_t> sizes(const std::string& what) const;
  // The member ``key`` of an object; null if absent.
  const Json& operator[](const std::string& key) const;

 private:
  template <typename T>
  const T& get(const std::string& what, const char* kind) const {
    if (const T* value = std::get_if<T>(&held_)) return *value;
    fail(what, " must be ", kind);
  }

  Held held_ = nullptr;
};

// A quoted JSON string.
std::string json_text(std::string_view text);

}  // namespace bitport::runner
