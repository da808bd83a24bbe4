#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "te_fl/watch.hpp"

// The file in which quarantines outlive a run.
namespace te_fl::dispatch {

// The content of a quarantine file. Nothing about the file is an error: an absent one has no
// entries, and what cannot be understood (the file as a whole, or an entry of a newer te-fl) is
// passed over.
struct QuarantineFile {
  std::vector<Quarantine> entries;
  std::vector<std::string> passed_over;  // a sentence each, with the way out
};
QuarantineFile read_quarantine_file(const std::string& path);

// True if two entries are about the same implementation, signature and device.
bool same(const Quarantine& a, const Quarantine& b);
bool contains(const std::vector<Quarantine>& list, const Quarantine& q);

// Entries by what they are about, for lists that are compared. They outlive it, where they are.
class QuarantineIndex {
 public:
  QuarantineIndex() = default;
  explicit QuarantineIndex(const std::vector<Quarantine>& list) {
    for (const Quarantine& q : list) add(q);
  }
  // False if one like it is there.
  bool add(const Quarantine& q) { return entries_.insert(&q).second; }
  bool contains(const Quarantine& q) const { return entries_.contains(&q); }

 private:
  struct Less {
    bool operator()(const Quarantine* a, const Quarantine* b) const;
  };
  std::set<const Quarantine*, Less> entries_;
};

// Adds entries to the file, whatever other threads and processes add meanwhile; entries that this
// te-fl does not understand stay. FAILED_PRECONDITION: it cannot be written, or holds something
// that is no quarantine file and that is left alone, or an entry is left out because it would come
// back as another: what it names is not UTF-8.
Status add_to_quarantine_file(const std::string& path, const std::vector<Quarantine>& added);

// Takes out the entries that are meant; the rest is as in add_to_quarantine_file.
Status remove_from_quarantine_file(const std::string& path,
                                   const std::function<bool(const Quarantine&)>& meant);

}  // namespace te_fl::dispatch
