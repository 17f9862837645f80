// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// kind is what a request asks of the kernel.
type kind uint8

const (
	readInto  kind = iota // to the places in iov
	writeFrom             // from them
	syncFile              // fdatasync
)

// request is one read or write with the kernel, or about to be. Requests are made at the
// start, each with its buffer. All is guarded by flights.Mu, but that what the kernel and
// the goroutine that serves it look at does not change meanwhile.
type request struct {
	slot   int
	buffer []byte // page-aligned, outside the Go heap

	kind   kind
	j      *job   // nil of a sync
	f      *file  // nil of a sync
	inode  *inode // of a sync
	past   bool   // past the page cache
	bounce bool   // through the buffer: to be scattered when it is there
	off    uint64 // in the file
	n      uint64 // bytes; of which need must come
	need   uint64
	done   uint64 // bytes
	fixed  int32  // registered buffer that all of iov lies in; -1: none
	first  cursor // of the pieces in it
	last   cursor // where the next request begins

	shared []driver.Shared // whose pages stay in place while the kernel writes there

	iov     []unix.Iovec // of what is left
	iovs    [iovecsMax]unix.Iovec
	retries int
	ending  atomic.Bool // it is to be cancelled: a thread that has it need not begin
}

// begin makes a free request one of a job.
func (r *request) begin(j *job, f *file, off uint64) {
	r.kind = readInto
	r.j, r.f, r.off = j, f, off
	r.past, r.bounce = false, false
	r.ending.Store(false)
	r.n, r.need, r.done, r.retries, r.fixed = 0, 0, 0, 0, -1
	r.first, r.iov = j.At, r.iovs[:0]
}

// beginSync makes a free request an fdatasync.
func (r *request) beginSync(n *inode) {
	r.kind = syncFile
	r.j, r.f, r.inode, r.iov = nil, nil, n, r.iovs[:0]
	r.past, r.bounce, r.fixed, r.retries, r.done = false, false, -1, 0, 0
	r.ending.Store(false)
}

// add appends memory; neighbours become one. It reports false where there is no place.
func (r *request) add(mem []byte) bool {
	if k := len(r.iov); k > 0 { // at most PieceMax bytes in all
		last := &r.iov[k-1]
		if touches(last, mem) {
			last.SetLen(int(last.Len) + len(mem))
			r.n += uint64(len(mem))
			return true
		}
		if k == len(r.iovs) {
			return false
		}
	}
	var v unix.Iovec
	v.Base = &mem[0]
	v.SetLen(len(mem))
	r.iov = append(r.iov, v)
	r.n += uint64(len(mem))
	return true
}

// fd returns the descriptor to use.
func (r *request) fd() int {
	switch {
	case r.kind == syncFile:
		return r.inode.sync
	case r.past:
		return r.f.direct
	}
	return r.f.fd
}

// access is the request's index in inode.writing.
func (r *request) access() int {
	if r.past {
		return direct
	}
	return cached
}

// advance takes n bytes away from what is left.
func (r *request) advance(n uint64) {
	r.done += n
	for n > 0 {
		v := &r.iov[0]
		if n >= v.Len {
			n -= v.Len
			r.iov = r.iov[1:]
			continue
		}
		v.Base = behind(v, n)
		v.SetLen(int(v.Len - n))
		n = 0
	}
}

// enter keeps the pages of memory that a read lands in where they are until release. False: a Renew
// waits or runs.
func (r *request) enter(e *extent) bool {
	s := e.shared
	if k := len(r.shared); s == nil || r.kind != readInto || k > 0 && r.shared[k-1] == s {
		return true
	}
	if !s.TryEnter() {
		return false
	}
	r.shared = append(r.shared, s)
	return true
}

// release forgets what it pointed to.
func (r *request) release() {
	for i, s := range r.shared {
		s.Leave()
		r.shared[i] = nil
	}
	r.shared = r.shared[:0]
	clear(r.iovs[:])
	r.j, r.f, r.inode, r.iov = nil, nil, nil, nil
}
