// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"net"
	"sync"
	"time"
)

// lobby is where those wait who have connected to Serve: strangers, and those who have proved
// who they are, until an exchange has room. Of strangers there are at most so many.
type lobby struct {
	most int
	mu   sync.Mutex // guards what follows
	in   map[net.Conn]visit
}

type visit struct {
	since  time.Time
	proven bool
}

// strangerMin is what a stranger has in any case to prove who it is. Where there are too many,
// the one who has had most is hung up on after it.
const strangerMin = 500 * time.Millisecond

// admit takes somebody in. It reports false if there are too many, none of whom may be hung up on.
func (y *lobby) admit(conn net.Conn) bool {
	y.mu.Lock()
	defer y.mu.Unlock()
	if len(y.in) >= y.most {
		var oldest net.Conn
		for c, v := range y.in {
			if !v.proven && (oldest == nil || v.since.Before(y.in[oldest].since)) {
				oldest = c
			}
		}
		if oldest == nil || time.Since(y.in[oldest].since) < strangerMin {
			return false
		}
		_ = oldest.Close()
		delete(y.in, oldest)
	}
	y.in[conn] = visit{since: time.Now()}
	return true
}

// prove notes that somebody is no stranger. It reports false for who was hung up on just now.
func (y *lobby) prove(conn net.Conn) bool {
	y.mu.Lock()
	defer y.mu.Unlock()
	v, in := y.in[conn]
	if in {
		v.proven = true
		y.in[conn] = v
	}
	return in
}

// leave takes somebody off the books; the place is free at once.
func (y *lobby) leave(conn net.Conn) {
	y.mu.Lock()
	defer y.mu.Unlock()
	delete(y.in, conn)
}
