// SPDX-License-Identifier: Apache-2.0

package files

import (
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// Kind is what a request asks of the kernel.
type Kind uint8

// The kinds.
const (
	Read  Kind = iota // into Places
	Write             // from them
	Sync              // fdatasync
)

// String returns "read", "write" or "sync".
func (k Kind) String() string { return [...]string{"read", "write", "sync"}[k] }

// Request is one read, write or sync with the Mover, or about to be. Requests are made at the
// start. All is guarded by Core.Mu, but that what the Mover and a goroutine in Serve look at does
// not change meanwhile.
type Request struct {
	Slot   int // below Config.Depth
	Kind   Kind
	File   *File       // nil of a sync
	Past   bool        // past the page cache
	Bounce bool        // by the buffer of the request
	Memory *Memory     // of its first place
	Off    uint64      // in the file, of its beginning
	N      uint64      // bytes
	Done   uint64      // of those, in the tries before
	Places []Place     // what is left
	Ending atomic.Bool // it is to be cancelled: what has not begun need not

	job     *job            // nil of a sync
	inode   *inode          // of a sync
	buffer  []byte          // page-aligned, outside the Go heap
	need    uint64          // bytes of N that must come
	first   cursor          // of the pieces in it
	last    cursor          // where the next request begins
	shared  []driver.Shared // whose pages stay in place while bytes land there
	retries int
	places  [placesMax]Place
}

// Place is a range of memory.
type Place struct {
	At, Len uint64 // address, bytes
}

// placesMax bounds the places of one request.
const placesMax = 64

// begin makes a free request one of a job, nil of a sync.
func (r *Request) begin(kind Kind, j *job) {
	r.Kind, r.job, r.Places = kind, j, r.places[:0]
	r.Past, r.Bounce = false, false
	r.N, r.need, r.Done, r.retries = 0, 0, 0, 0
	r.Ending.Store(false)
}

// add appends memory; neighbours become one. It reports false where there is no place for it.
func (r *Request) add(at, n uint64, most int) bool {
	if k := len(r.Places); k > 0 { // at most PieceMax bytes in all
		if last := &r.Places[k-1]; last.At+last.Len == at {
			last.Len += n
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

// FD returns the descriptor to use.
func (r *Request) FD() int {
	switch {
	case r.Kind == Sync:
		return r.inode.sync
	case r.Past:
		return r.File.Direct
	}
	return r.File.FD
}

// access is the request's index in inode.writing.
func (r *Request) access() int {
	if r.Past {
		return direct
	}
	return cached
}

// advance takes n bytes away from what is left.
func (r *Request) advance(n uint64) {
	r.Done += n
	for n > 0 {
		v := &r.Places[0]
		if n >= v.Len {
			n -= v.Len
			r.Places = r.Places[1:]
			continue
		}
		v.At, v.Len = v.At+n, v.Len-n
		n = 0
	}
}

// enter keeps the pages of memory that a read lands in where they are until release. False: a Renew
// waits or runs.
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

// release forgets what it pointed to.
func (r *Request) release() {
	for i, s := range r.shared {
		s.Leave()
		r.shared[i] = nil
	}
	r.shared = r.shared[:0]
	r.job, r.File, r.Memory, r.inode, r.Places = nil, nil, nil, nil, nil
}
