// SPDX-License-Identifier: Apache-2.0

package hostmem

import "sort"

// spans is a set of bytes: ordered ranges that neither touch nor overlap.
type spans []span

type span struct{ from, to uint64 }

// at returns the index of the first range that ends at or after off.
func (s spans) at(off uint64) int {
	return sort.Search(len(s), func(i int) bool { return s[i].to >= off })
}

// overlaps reports whether any byte of [off, off+n) is in the set.
func (s spans) overlaps(off, n uint64) bool {
	i := s.at(off + 1)
	return i < len(s) && s[i].from < off+n
}

// remove takes [off, off+n) out of the set.
func (s *spans) remove(off, n uint64) {
	from, to := off, off+n
	var out spans
	for _, r := range *s {
		if r.from < min(r.to, from) {
			out = append(out, span{r.from, min(r.to, from)})
		}
		if max(r.from, to) < r.to {
			out = append(out, span{max(r.from, to), r.to})
		}
	}
	*s = out
}

// add puts [off, off+n) into the set.
func (s *spans) add(off, n uint64) {
	from, to := off, off+n
	first := s.at(from)
	last := first
	for last < len(*s) && (*s)[last].from <= to {
		from, to = min(from, (*s)[last].from), max(to, (*s)[last].to)
		last++
	}
	tail := append(spans{{from, to}}, (*s)[last:]...)
	*s = append((*s)[:first], tail...)
}
