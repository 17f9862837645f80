// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sort"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// layer is one memfd as long as the Buffer. A piece of the Buffer that lies in
// it has the same offset there, so a layer serves many calls of Renew with one
// descriptor, and huge pages keep their alignment. What is not used is a hole
// and costs nothing.
type layer struct {
	fd   int
	huge bool
	used spans // of pieces, and old
	old  []oldRange
}

// oldRange is what a piece was in. An old mapping may reach it: it is not used again before over.
type oldRange struct {
	span
	over func() bool
}

// reclaim makes old ranges free that reach into [off, off+n) and that no process writes to any
// more. What late writers have put there is given back.
func (l *layer) reclaim(off, n uint64) {
	l.old = slices.DeleteFunc(l.old, func(o oldRange) bool {
		if o.from >= off+n || o.to <= off || !o.over() {
			return false
		}
		l.discard(o.from, o.to-o.from)
		l.used.remove(o.from, o.to-o.from)
		return true
	})
}

// leave is told that a piece is in this range no more.
func (l *layer) leave(off, n uint64, over func() bool) {
	l.discard(off, n)
	l.old = append(l.old, oldRange{span{off, off + n}, over})
}

const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// newLayer makes a memfd whose size can never change, so that no process that maps
// it dies of SIGBUS, and to which none can add seals that shut us out.
func newLayer(purpose string, size uint64, huge bool) (*layer, error) {
	fd, err := memfd(purpose, huge)
	if err != nil {
		return nil, fmt.Errorf("create memfd: %w", err)
	}
	l := &layer{fd: fd, huge: huge}
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		return nil, errors.Join(fmt.Errorf("size memfd to %d bytes: %w", size, err), l.close())
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return nil, errors.Join(fmt.Errorf("seal memfd: %w", err), l.close())
	}
	return l, nil
}

func memfd(purpose string, huge bool) (int, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	if huge {
		flags |= unix.MFD_HUGETLB | unix.MFD_HUGE_2MB
	}
	name := "sluice-" + strings.ReplaceAll(purposeName(purpose), "\x00", "?")
	name = name[:min(len(name), 200)] // the kernel takes 249 bytes
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL { // before Linux 6.3
		fd, err = unix.MemfdCreate(name, flags)
	}
	return fd, os.NewSyscallError("memfd_create", err)
}

// discard gives the pages of a range back. What an old mapping still writes
// there gets pages of its own. Not with hugetlb: there such a write would find
// no page, and the peer would die of SIGBUS.
func (l *layer) discard(off, n uint64) {
	if !l.huge {
		_ = unix.Fallocate(l.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(off),
			int64(n))
	}
}

func (l *layer) close() error { return os.NewSyscallError("close", unix.Close(l.fd)) }

// piece is a run of a Buffer that lies in one layer, at the same offset there.
type piece struct {
	off, len uint64
	layer    *layer
}

func (p piece) end() uint64 { return p.off + p.len }

// Lend implements driver.Shared. It keeps Close out, too, while f runs.
func (b *Buffer) Lend(f func(extents []driver.Extent) error) error {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if b.mem == nil {
		return driver.ErrClosed
	}
	extents := make([]driver.Extent, len(b.pieces))
	for i, p := range b.pieces {
		extents[i] = driver.Extent{Off: p.off, Len: p.len, FD: p.layer.fd, FDOff: p.off}
	}
	return f(extents)
}

// splice puts a piece over others and joins it with neighbours in its layer.
func splice(pieces []piece, p piece) []piece {
	first, last, p := around(pieces, p)
	var put []piece
	if q := pieces[first]; q.off < p.off {
		put = append(put, piece{q.off, p.off - q.off, q.layer})
	}
	put = append(put, p)
	if q := pieces[last]; p.end() < q.end() {
		put = append(put, piece{p.end(), q.end() - p.end(), q.layer})
	}
	return slices.Replace(pieces, first, last+1, put...)
}

// spliced is how many pieces there would be.
func spliced(pieces []piece, p piece) int {
	first, last, p := around(pieces, p)
	n := len(pieces) - (last - first)
	if pieces[first].off < p.off {
		n++
	}
	if p.end() < pieces[last].end() {
		n++
	}
	return n
}

// around widens a piece by its neighbours in the same layer, and returns the first and last that
// it then lies over.
func around(pieces []piece, p piece) (first, last int, wide piece) {
	first = sort.Search(len(pieces), func(i int) bool { return pieces[i].end() > p.off })
	last = first + sort.Search(len(pieces)-first, func(i int) bool {
		return pieces[first+i].end() >= p.end()
	})
	from, to := p.off, p.end()
	if first > 0 && pieces[first].off == from && pieces[first-1].layer == p.layer {
		first--
	}
	if last+1 < len(pieces) && pieces[last].end() == to && pieces[last+1].layer == p.layer {
		last++
	}
	if q := pieces[first]; q.layer == p.layer {
		from = min(from, q.off)
	}
	if q := pieces[last]; q.layer == p.layer {
		to = max(to, q.end())
	}
	return first, last, piece{from, to - from, p.layer}
}

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
