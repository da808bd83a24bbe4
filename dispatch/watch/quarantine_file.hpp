#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "te_fl/watch.hpp"

// The file that keeps quarantine entries from one run to the next.
namespace te_fl::dispatch {

// The contents of a quarantine file. Reading never fails: an absent file has no entries. A file or
// an entry in an unknown format, for example of a newer te-fl, is skipped.
struct QuarantineFile {
  std::vector<Quarantine> entries;
  std::vector<std::string> passed_over;  // one sentence each, with a remedy
};
QuarantineFile read_quarantine_file(const std::string& path);

// Entries as one text, and back. A text with an entry that cannot be read is INVALID_ARGUMENT.
std::string quarantines_text(const std::vector<Quarantine>& entries);
Result<std::vector<Quarantine>> parse_quarantines(const std::string& text);

// True if two entries have the same implementation, signature and device.
bool same(const Quarantine& a, const Quarantine& b);
bool contains(const std::vector<Quarantine>& list, const Quarantine& q);

// A set of entries, keyed by implementation, signature and device. It stores pointers, so the
// entries must outlive it and keep their addresses.
class QuarantineIndex {
 public:
  QuarantineIndex() = default;
  explicit QuarantineIndex(const std::vector<Quarantine>& list) {
    for (const Quarantine& q : list) add(q);
  }
  // Adds an entry. False if an entry with the same key exists.
  bool add(const Quarantine& q) { return entries_.insert(&q).second; }
  bool contains(const Quarantine& q) const { return entries_.contains(&q); }

 private:
  struct Less {
    bool operator()(const Quarantine* a, const Quarantine* b) const;
  };
  std::set<const Quarantine*, Less> entries_;
};

// Adds entries to the file, atomically with respect to other threads and processes. Keeps entries
// that this te-fl does not understand. FAILED_PRECONDITION if the file cannot be written, if it is
// not a quarantine file (it is then left unchanged), or if an entry was skipped because its names
// are not UTF-8 and would change in the file.
Status add_to_quarantine_file(const std::string& path, const std::vector<Quarantine>& added);

// Removes the entries for which `meant` returns true; otherwise as add_to_quarantine_file.
Status remove_from_quarantine_file(const std::string& path,
                                   const std::function<bool(const Quarantine&)>& meant);

}  // namespace te_fl::dispatch
