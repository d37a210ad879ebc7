#include "json.h"
#include <algorithm>
#include <charconv>

namespace bitport::runner {
namespace {

constexpr int kMostLevels = 32;

class Reader {
 public:
  Reader(std::string_view text, const std::string& where) : text_(text), where_(where) {}

  Json whole() {
    Json value = any(0);
    if (space() < text_.size()) wrong("something follows the end");
    return value;
  }

 private:
  [[noreturn]] void wrong(const char* reason) { fail(where_, ": no valid JSON at byte ", at_, ": ", reason); }

  size_t space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) ++at_;
    return at_;
  }

  bool take(char letter) {
    if (space() >= text_.size() || text_[at_] != letter) return false;
    ++at_;
    return true;
  }

  void want(char letter, const char* reason) {
    if (!take(letter)) wrong(reason);
  }

  bool word(std::string_view name) {
    if (text_.substr(at_, name.size()) != name) return false;
    at_ += name.size();
    return true;
  }

  Json any(int level) {
    if (level > kMostLevels) wrong("nested too deep");
    if (space() >= text_.size()) wrong("it ends too early");
    if (text_[at_] == '{') return object(level);
    if (text_[at_] == '[') return array(level);
    if (text_[at_] == '"') return Json(string());
    if (word("true")) return Json(true);
    if (word("false")) return Json(false);
    if (word("null")) return Json();
    return number();
  }

  Json object(int level) {
    JsonObject members;
    want('{', "an object");
    if (take('}')) return Json(std::move(members));
    do {
      space();
      std::string key = string();
      want(':', "a colon follows a key");
      members.emplace_back(std::move(key), any(level + 1));
    } while (take(','));
    want('}', "a comma or } follows a member");
    if (has_twins(members)) wrong("a key stands in this object twice");
    return Json(std::move(members));
  }

  static bool has_twins(const JsonObject& members) {
    constexpr size_t kFew = 8;   // compared pairwise
    if (members.size() <= kFew) {
      for (size_t i = 1; i < members.size(); ++i)
        for (size_t j = 0; j < i; ++j)
          if (members[i].first == members[j].first) return true;
      return false;
    }
    std::vector<std::string_view> keys;
    keys.reserve(members.size());
    for (const auto& [key, value] : members) keys.push_back(key);
    std::sort(keys.begin(), keys.end());
    return std::adjacent_find(keys.begin(), keys.end()) != keys.end();
  }

  Json array(int level) {
    JsonArray values;
    want('[', "an array");
    if (take(']')) return Json(std::move(values));
    do values.push_back(any(level + 1));
    while (take(','));
    want(']', "a comma or ] follows a value");
    return Json(std::move(values));
  }

  Json number() {
    const char *const begin = text_.data() + at_, *const limit = text_.data() + text_.size();
    const auto is_digit = [&](const char* at) { return at < limit && *at >= '0' && *at <= '9'; };
    const char* const first = begin + (*begin == '-');
    if (!is_digit(first)) wrong("a value is wanted");
    if (*first == '0' && is_digit(first + 1)) wrong("a number begins with a zero");
    int64_t value = 0;
    auto read = std::from_chars(begin, limit, value);
    const bool whole = read.ptr == limit || (*read.ptr != '.' && *read.ptr != 'e' && *read.ptr != 'E');
    if (!whole && *read.ptr == '.' && !is_digit(read.ptr + 1)) wrong("digits follow a point");
    double real = 0;
    if (!whole) read = std::from_chars(begin, limit, real);
    if (read.ec != std::errc()) wrong("a number too large");
    at_ += size_t(read.ptr - begin);
    return whole ? Json(value) : Json(real);
  }

  uint32_t hex() {
    const std::string_view digits = text_.substr(at_, 4);
    uint32_t value = 0;
    const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    if (read.ptr != digits.data() + 4) wrong("four hexadecimal digits follow \\u");
    at_ += 4;
    return value;
  }

  void escaped(std::string& out) {
    static constexpr std::string_view kShort = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
    if (at_ >= text_.size()) wrong("it ends in a string");
    const char letter = text_[at_++];
    if (const size_t found = kShort.find(letter); found != kShort.npos) return void(out += kMeant[found]);
    if (letter != 'u') wrong("an unknown escape");
    uint32_t code = hex();
    if (code >= 0xd800 && code < 0xe000) {
      const bool pair = code < 0xdc00 && word("\\u");
      const uint32_t low = pair ? hex() : 0;
      if (low < 0xdc00 || low > 0xdfff) wrong("half a surrogate pair");
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    if (code < 0x80) return void(out += char(code));
    const int rest = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;   // continuation bytes in UTF-8
    out += char((rest == 1 ? 0xc0 : rest == 2 ? 0xe0 : 0xf0) | code >> 6 * rest);
    for (int i = rest - 1; i >= 0; --i) out += char(0x80 | (code >> 6 * i & 63));
  }

  std::string string() {
    std::string out;
    want('"', "a string is wanted");
    for (;;) {
      const size_t begin = at_;
      while (at_ < text_.size() && text_[at_] != '"' && text_[at_] != '\\' && static_cast<unsigned char>(text_[at_]) >= 32) ++at_;
      out.append(text_, begin, at_ - begin);
      if (at_ >= text_.size()) wrong("it ends in a string");
      const char letter = text_[at_++];
      if (letter == '"') return out;
      if (letter != '\\') wrong("a control character in a string");
      escaped(out);
    }
  }

  std::string_view text_;
  const std::string& where_;
  size_t at_ = 0;
};

}  // namespace

Json Json::parse(std::string_view text, const std::string& where) { return Reader(text, where).whole(); }

double Json::real(const std::string& what) const {
  const int64_t* whole = std::get_if<int64_t>(&held_);
  return whole ? double(*whole) : get<double>(what, "a number");
}

uint64_t Json::size(const std::string& what) const {
  const int64_t value = number(what);
  if (value < 0) fail(what, " is ", value, ", below zero");
  return uint64_t(value);
}

std::vector<int64_t> Json::sizes(const std::string& what) const {
  std::vector<int64_t> made;
  for (const Json& each : array(what)) made.push_back(int64_t(each.size(what)));
  return made;
}

const Json& Json::operator[](const std::string& key) const {
  static const Json kNone;
  if (const JsonObject* members = std::get_if<JsonObject>(&held_))
    for (const auto& [name, value] : *members)
      if (name == key) return value;
  return kNone;
}

std::string json_text(std::string_view text) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char letter : text) {
    const auto code = static_cast<unsigned char>(letter);
    if (letter == '"' || letter == '\\') out += '\\';
    if (code >= 32) out += letter;
    else ((out += "\\u00") += kDigits[code >> 4]) += kDigits[code & 15];
  }
  return out + '"';
}

}  // namespace bitport::runner
