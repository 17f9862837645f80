// SPDX-License-Identifier: Apache-2.0

package weights

import (
	"cmp"
	"errors"
	"fmt"
	"io"
)

// piece is one read: bytes of one or more tensors that are contiguous in a file and in memory.
type piece struct {
	file   int
	offset int64
	into   []byte
	first  int   // index of the first item
	skip   int64 // bytes of the first item before the piece
}

// read is the goroutine of a reader. It ends when all is read or reading has stopped.
func (l *Load) read() {
	for {
		p, ok := l.claim()
		if !ok {
			return
		}
		n, err := l.source[p.file].ReadAt(p.into, p.offset)
		if n < len(p.into) { // io.EOF after all bytes is no error
			l.end(l.fault(&p, n, cmp.Or(err, io.ErrUnexpectedEOF)))
			return
		}
		l.credit(&p)
	}
}

// claim takes the next piece. It waits until there is memory for a part of it.
func (l *Load) claim() (p piece, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.err == nil && l.next < len(l.items) {
		if p, ok = l.gather(); ok {
			return p, true
		}
		if l.next < len(l.items) && l.items[l.next].state == waiting {
			l.room.Wait()
		}
	}
	return piece{}, false
}

// gather builds the next piece: the rest of the next tensor, and the tensors after it as long as
// they are contiguous with it in the file and in memory. Preconditions: l.mu is held.
func (l *Load) gather() (p piece, ok bool) {
	size, most := int64(0), int64(l.cfg.Piece)
	for l.next < len(l.items) && size < most {
		it := &l.items[l.next]
		if it.state == waiting && !l.ring.place(l.items, l.next, l.follows()) {
			break
		}
		if it.Len == 0 {
			l.arrive(l.next)
			l.next++
			continue
		}
		switch at := it.at + l.done; {
		case size == 0:
			p = piece{file: it.file, offset: it.offset + l.done, first: l.next, skip: l.done}
			if past := (p.offset + most) % pageBytes; l.cfg.Straight && past < most {
				most -= past // so that the next piece begins at a page boundary
			}
		case it.file != p.file || it.offset != p.offset+size || at != l.items[p.first].at+p.skip+
			size:
			return l.cut(p, size)
		}
		n := min(it.Len-l.done, most-size)
		size += n
		if l.done += n; l.done == it.Len {
			l.last, l.next, l.done = l.next, l.next+1, 0
		}
	}
	return l.cut(p, size)
}

// cut sets the memory of a piece of size bytes.
func (l *Load) cut(p piece, size int64) (piece, bool) {
	if size == 0 {
		return p, false
	}
	at := l.items[p.first].at + p.skip
	p.into = l.ring.memory[at : at+size : at+size]
	return p, true
}

// follows reports whether the next item begins in its file where the last non-empty one ends.
// Preconditions: l.mu is held.
func (l *Load) follows() bool {
	if l.last < 0 {
		return false
	}
	before, it := &l.items[l.last], &l.items[l.next]
	return before.file == it.file && before.offset+before.Len == it.offset
}

// credit counts the bytes of a completed read, and hands out the items that are complete.
func (l *Load) credit(p *piece) {
	l.mu.Lock()
	defer l.mu.Unlock()
	rest, skip := int64(len(p.into)), p.skip
	for i := p.first; rest > 0; i++ {
		// the items of a piece follow each other, empty ones between them
		it := &l.items[i]
		part := min(rest, it.Len-skip)
		rest, skip = rest-part, 0
		if it.left -= part; it.left == 0 && part > 0 {
			l.arrive(i)
		}
	}
}

// fault returns the error of a read that failed after n bytes, with its file and tensor.
func (l *Load) fault(p *piece, n int, err error) error {
	i, past := p.first, int64(n)+p.skip
	for ; past >= l.items[i].Len && i < len(l.items)-1; i++ {
		past -= l.items[i].Len
	}
	src, name, at := l.source[p.file], l.items[i].Name, p.offset+int64(n)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return faulty(src.Name, name, "the file ends at %d, and had %d bytes when it was opened",
			at, src.Size)
	}
	return &FileError{File: src.Name, Tensor: name, Err: fmt.Errorf("read at %d: %w", at, err)}
}

// arrive marks an item as ready and wakes the waiting callers. Preconditions: l.mu is held.
func (l *Load) arrive(i int) {
	l.items[i].state = ready
	l.arrived = append(l.arrived, i)
	l.wakeWaiters()
}
