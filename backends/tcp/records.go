// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"net"
	"sync"
)

// records is a socket below TLS, which writes one record of 16 KiB after the other. Between hold
// and flush they wait in a chunk, so that the kernel is called once for several.
type records struct {
	*net.TCPConn
	b *Backend

	mu     sync.Mutex // TLS may write of itself while the program reads
	chunk  *chunk     // nil: nothing is held back
	holds  bool
	failed error
}

// recordsSlack is by how much the records of what fits into a chunk may exceed it.
const recordsSlack = 256

// hold keeps what is written until flush.
func (r *records) hold() {
	r.mu.Lock()
	r.holds = true
	r.mu.Unlock()
}

// flush writes what was kept. What failed once fails for good, as TLS does.
func (r *records) flush() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.holds = false
	r.empty()
	return r.failed
}

// Write implements net.Conn.
func (r *records) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.chunk != nil && len(p) > len(r.chunk.mem)-r.chunk.n {
		r.empty()
	}
	if r.failed != nil {
		return 0, r.failed
	}
	if !r.holds {
		return r.TCPConn.Write(p)
	}
	if r.chunk == nil {
		r.chunk = r.b.chunks.take()
	}
	r.chunk.n += copy(r.chunk.mem[r.chunk.n:], p) // a record is smaller than a chunk
	return len(p), nil
}

func (r *records) empty() {
	if r.chunk == nil {
		return
	}
	if _, err := r.TCPConn.Write(r.chunk.mem[:r.chunk.n]); r.failed == nil {
		r.failed = err
	}
	r.b.chunks.give(r.chunk)
	r.chunk = nil
}
