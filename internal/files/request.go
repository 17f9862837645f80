// SPDX-License-Identifier: Apache-2.0

package files

import (
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// Kind is the operation of a request.
type Kind uint8

// The kinds.
const (
	Read  Kind = iota // from the file to Places
	Write             // from Places to the file
	Sync              // fdatasync
)

// String returns "read", "write" or "sync".
func (k Kind) String() string { return [...]string{"read", "write", "sync"}[k] }

// Request is one read, write or sync that the core hands to the Mover. Open makes Config.Depth
// requests; they are reused.
//
// Core.Mu guards all fields. The Mover and Serve also read fields of a request without the lock
// while the Mover has it; the core does not change those meanwhile.
type Request struct {
	Slot   int // index among the requests, below Config.Depth
	Kind   Kind
	File   *File   // nil for a sync
	Direct bool    // bypasses the page cache (O_DIRECT)
	Bounce bool    // a read into buffer, from which Serve copies to the program's memory
	Memory *Memory // the memory of the first place
	Off    uint64  // offset in the file
	N      uint64  // bytes, from Off on
	Done   uint64  // bytes of N that earlier attempts have moved
	Places []Place // memory of the remaining bytes, in file order

	// Scattered says that each place has an offset of its own, in Offs, and that Off is not used: a
	// short write through the page cache costs little more than what is done for each request.
	Scattered bool
	Offs      []uint64    // in the file, of Places
	Ending    atomic.Bool // cancelled: the Mover need not begin what it has not begun

	job     *job            // nil for a sync
	inode   *inode          // the file that a sync is for; nil for a read or write
	buffer  []byte          // page-aligned, outside the Go heap
	need    uint64          // bytes of N that the job needs; the rest only fills the last block
	first   cursor          // where the request begins in the job
	last    cursor          // where it ends: the next request begins there
	shared  []driver.Shared // entered while the request may write to their pages
	retries int
	places  [placesMax]Place // backing array of Places
	offs    [placesMax]uint64
}

// Place is a contiguous range of memory.
type Place struct {
	At, Len uint64 // address, bytes
}

// placesMax bounds the places of one request.
const placesMax = 64

// begin resets a free request for a job; j is nil for a sync.
func (r *Request) begin(kind Kind, j *job) {
	r.Kind, r.job, r.Places, r.Offs = kind, j, r.places[:0], r.offs[:0]
	r.Direct, r.Bounce, r.Scattered = false, false, false
	r.N, r.need, r.Done, r.retries = 0, 0, 0, 0
	r.Ending.Store(false)
}

// add appends n bytes at an address to the request. It extends the last place if the bytes follow
// it directly. It returns false if they need another place and the request has most places.
func (r *Request) add(at, n uint64, most int) bool {
	if k := len(r.Places); k > 0 {
		if last := &r.Places[k-1]; last.At+last.Len == at {
			last.Len += n // cannot overflow: the caller bounds N by PieceMax
			r.N += n
			return true
		}
		if k == most {
			return false
		}
	}
	r.Places = append(r.Places, Place{at, n})
	r.N += n
	return true
}

// addApart appends n bytes at an address to the request, which becomes one whose places have
// offsets of their own. It returns false if the request has most places.
func (r *Request) addApart(at, n, off uint64, most int) bool {
	if len(r.Places) == most {
		return false
	}
	if !r.Scattered {
		r.Scattered = true
		next := r.Off
		for _, v := range r.Places {
			r.Offs = append(r.Offs, next)
			next += v.Len
		}
	}
	r.Places, r.Offs = append(r.Places, Place{at, n}), append(r.Offs, off)
	r.N += n
	return true
}

// offset returns where the first remaining byte lies in the file.
func (r *Request) offset() uint64 {
	if r.Scattered && len(r.Offs) > 0 {
		return r.Offs[0]
	}
	return r.Off + r.Done
}

// FD returns the file descriptor that the Mover must use for the request.
func (r *Request) FD() int {
	switch {
	case r.Kind == Sync:
		return r.inode.sync
	case r.Direct:
		return r.File.Direct
	}
	return r.File.FD
}

// access returns the index of the request's kind of access, cached or direct, in inode.writing.
func (r *Request) access() int {
	if r.Direct {
		return direct
	}
	return cached
}

// advance records that n more bytes were moved, and removes their memory from Places.
func (r *Request) advance(n uint64) {
	r.Done += n
	for n > 0 {
		v := &r.Places[0]
		if n >= v.Len {
			n -= v.Len
			r.Places = r.Places[1:]
			if r.Scattered {
				r.Offs = r.Offs[1:]
			}
			continue
		}
		v.At, v.Len = v.At+n, v.Len-n
		if r.Scattered {
			r.Offs[0] += n
		}
		n = 0
	}
}

// enter keeps hostmem's Renew from replacing the pages of m until release, if the request reads
// from the file into them. It returns false while a Renew of these pages waits or runs.
func (r *Request) enter(m *Memory) bool {
	s := m.shared
	if k := len(r.shared); s == nil || r.Kind != Read || k > 0 && r.shared[k-1] == s {
		return true
	}
	if !s.TryEnter() {
		return false
	}
	r.shared = append(r.shared, s)
	return true
}

// release leaves the shared pages and drops all references, before the request is free again.
func (r *Request) release() {
	for i, s := range r.shared {
		s.Leave()
		r.shared[i] = nil
	}
	r.shared = r.shared[:0]
	r.job, r.File, r.Memory, r.inode, r.Places, r.Offs = nil, nil, nil, nil, nil, nil
}
