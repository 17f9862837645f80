// SPDX-License-Identifier: Apache-2.0

// Package lobby bounds the accepted connections whose handshake has not completed.
//
// A listener that refuses new connections while too many are silent can be shut to all new
// peers by a few silent ones. A Lobby closes the oldest of them instead.
package lobby

import (
	"io"
	"sync"
	"time"
)

// Least is the time that each connection has for its handshake. A connection that has had
// more is closed when another needs its place.
const Least = 500 * time.Millisecond

// Lobby holds connections from when they are accepted until they are served or have ended.
// Its methods may be called by any goroutine.
type Lobby struct {
	Most int // connections at a time; set before use

	mu sync.Mutex
	in map[io.Closer]visit
}

type visit struct {
	since time.Time
	known bool
}

// Admit takes a connection in. Where there is no place it closes the one that has been
// unknown for longest, if that has had Least. Otherwise it reports false, and the caller
// closes the new one.
func (l *Lobby) Admit(conn io.Closer) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.in) >= l.Most {
		oldest := l.oldest()
		if oldest == nil || time.Since(l.in[oldest].since) < Least {
			return false
		}
		_ = oldest.Close() // nothing was said over it
		delete(l.in, oldest)
	}
	if l.in == nil {
		l.in = make(map[io.Closer]visit)
	}
	l.in[conn] = visit{since: time.Now()}
	return true
}

// oldest returns the connection that has been unknown for longest; nil: all are known.
func (l *Lobby) oldest() (oldest io.Closer) {
	for conn, v := range l.in {
		if !v.known && (oldest == nil || v.since.Before(l.in[oldest].since)) {
			oldest = conn
		}
	}
	return oldest
}

// Keep says that a connection has completed its handshake and waits to be served: it keeps
// its place, and Admit does not close it any more. It reports false for one that is gone.
func (l *Lobby) Keep(conn io.Closer) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	v, in := l.in[conn]
	if in {
		v.known = true
		l.in[conn] = v
	}
	return in
}

// Leave makes the place of a connection free, and reports whether it had one: Admit may have
// closed it.
func (l *Lobby) Leave(conn io.Closer) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, in := l.in[conn]
	delete(l.in, conn)
	return in
}
