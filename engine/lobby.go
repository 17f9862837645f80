// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"net"
	"sync"
	"time"
)

// lobby holds the connections to Serve that have no exchange yet. They are told apart by what
// they have shown: nothing; a user or a certificate; a description. When there are too many,
// one that has kept silent for long is closed.
type lobby struct {
	most int
	mu   sync.Mutex // guards what follows
	in   map[net.Conn]visit
}

type visit struct {
	since time.Time
	shown shown
}

// shown is what a connection has shown of itself.
type shown uint8

const (
	nothing shown = iota
	identityShown
	descriptionShown
)

// silenceMin is how long a connection may keep silent in any case.
const silenceMin = 500 * time.Millisecond

// admit takes a connection in. It reports false if there are too many, none of which may be
// closed. One without an identity goes before one that has shown one, and the oldest first.
func (y *lobby) admit(conn net.Conn) bool {
	y.mu.Lock()
	defer y.mu.Unlock()
	if len(y.in) >= y.most {
		var oldest net.Conn
		for c, v := range y.in {
			if v.shown == descriptionShown || time.Since(v.since) < silenceMin {
				continue
			}
			if o := y.in[oldest]; oldest == nil || v.shown < o.shown || v.shown == o.shown &&
				v.since.Before(o.since) {
				oldest = c
			}
		}
		if oldest == nil {
			return false
		}
		_ = oldest.Close()
		delete(y.in, oldest)
	}
	y.in[conn] = visit{since: time.Now()}
	return true
}

// note keeps what a connection has shown. It reports false for one that was closed just now.
func (y *lobby) note(conn net.Conn, what shown) bool {
	y.mu.Lock()
	defer y.mu.Unlock()
	v, in := y.in[conn]
	if in {
		v.shown = what
		y.in[conn] = v
	}
	return in
}

// leave forgets a connection; its place is free at once.
func (y *lobby) leave(conn net.Conn) {
	y.mu.Lock()
	defer y.mu.Unlock()
	delete(y.in, conn)
}
