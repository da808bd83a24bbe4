#include "mutation.hpp"

#include <set>
#include <sstream>
#include <stdexcept>

namespace te_fl::mutants {
namespace {

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

[[noreturn]] void wrong(const std::string& what) {
  throw std::invalid_argument("\"" + what + "\" is no part of a mutation; see mutation.hpp");
}

Condition condition_of(const std::string& text) {
  static const std::set<std::string> extents = {"elements", "rows", "columns"};
  const std::vector<std::string> words = words_of(text);
  Condition c;
  if (words.size() == 2 && (words[1] == "given" || words[1] == "absent" || words[1] == "in_place"))
    c = {words[0], words[1], "", 0};
  else if (words.size() == 3 && words[1] == "is")
    c = {words[0], words[1], words[2], 0};
  else if (words.size() == 3 && (words[1] == ">" || words[1] == "=="))
    c = {words[0], words[1], "", std::stod(words[2])};
  else if (words.size() == 4 && extents.count(words[1]) != 0 && words[2] == ">")
    c = {words[0], words[1], "", std::stod(words[3])};
  else
    wrong(text);
  return c;
}

void parse_fault(const std::string& text, Mutation& m) {
  static const std::set<std::string> verbs = {"ignore", "set",   "floor",    "cap",
                                              "float",  "rng",   "read",     "write",
                                              "part",   "scale", "unscaled", "ties"};
  const std::vector<std::string> words = words_of(text);
  if (words.size() < 2 || words.size() > 4 || verbs.count(words[0]) == 0) wrong(text);
  m.verb = words[0], m.argument = words[1];
  const bool numeric =
      m.verb == "set" || m.verb == "floor" || m.verb == "cap" || m.verb == "unscaled";
  if (words.size() > 2) (numeric ? m.word : m.kind) = words[2];
  if (words.size() > 3) m.word = words[3];
  if (!m.word.empty() && m.verb != "part") m.number = std::stod(m.word);
}

}  // namespace

Mutation parse(const std::string& text) {
  const size_t colon = text.find(": ");
  if (colon == std::string::npos) wrong(text);
  Mutation m;
  std::string head = text.substr(0, colon);
  if (const size_t at = head.find(" if "); at != std::string::npos) {
    std::istringstream conditions(head.substr(at + 4));
    for (std::string one; std::getline(conditions, one, ',');)
      m.conditions.push_back(condition_of(one));
    head.resize(at);
  }
  m.op = head;
  parse_fault(text.substr(colon + 2), m);
  return m;
}

}  // namespace te_fl::mutants
