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

// layer is a memfd of the length of the Buffer, in which pieces of the Buffer lie at the same
// offset. So many calls of Renew need one descriptor only, and huge pages keep their alignment.
// Ranges that are not used are holes, and cost no memory.
type layer struct {
	fd      int
	huge    bool
	used    spans // ranges of pieces, and retired ones
	retired []retiredRange
}

// retiredRange is a range in which a piece lay. Other processes may still have it mapped and write
// there, so it is not used again before quiet reports true: no process writes there any more.
type retiredRange struct {
	span
	quiet func() bool
}

// reclaim makes retired ranges that overlap [off, off+n) free to use again, if they are quiet. It
// gives back the pages that late writers have put there.
func (l *layer) reclaim(off, n uint64) {
	l.retired = slices.DeleteFunc(l.retired, func(o retiredRange) bool {
		if o.from >= off+n || o.to <= off || !o.quiet() {
			return false
		}
		l.discard(o.from, o.to-o.from)
		l.used.remove(o.from, o.to-o.from)
		return true
	})
}

// retire gives back the pages of a range in which no piece lies any more.
func (l *layer) retire(off, n uint64, quiet func() bool) {
	l.discard(off, n)
	l.retired = append(l.retired, retiredRange{span{off, off + n}, quiet})
}

const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// newLayer makes a memfd whose size can never change, so that no process that maps it dies of
// SIGBUS, and to which no process can add seals that would forbid us to write.
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

// discard gives the pages of a range back to the kernel. A process that still has the range mapped
// and writes there gets new pages from the kernel. With hugetlb it might get none and die of
// SIGBUS, so those are not given back.
func (l *layer) discard(off, n uint64) {
	if !l.huge {
		_ = unix.Fallocate(l.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(off),
			int64(n))
	}
}

func (l *layer) close() error { return os.NewSyscallError("close", unix.Close(l.fd)) }

// piece is a range of a Buffer that lies in one layer, at the same offset there.
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

// splice returns the list of pieces in which p covers what was there, joined with neighbours in the
// same layer.
func splice(pieces []piece, p piece) []piece {
	first, last, p := widen(pieces, p)
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

// piecesAfterSplice returns the length of the list that splice would return.
func piecesAfterSplice(pieces []piece, p piece) int {
	first, last, p := widen(pieces, p)
	n := len(pieces) - (last - first)
	if pieces[first].off < p.off {
		n++
	}
	if p.end() < pieces[last].end() {
		n++
	}
	return n
}

// widen returns p joined with its neighbours in the same layer, and the indices of the first and
// the last piece that this covers, wholly or in part.
func widen(pieces []piece, p piece) (first, last int, wide piece) {
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

// spans is a set of offsets, as ranges in order with a gap between any two.
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
