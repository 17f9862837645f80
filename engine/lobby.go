// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"net"
	"sync"
	"time"
)

// lobby holds the connections to Serve that have no exchange yet. They are told apart by what
// they have shown: nothing; a user or a certificate; a description. When there are too many,
// one that has kept silent for long is closed, or one from a host that has most of the places.
type lobby struct {
	most int
	mu   sync.Mutex // guards what follows
	in   map[net.Conn]visit
}

type visit struct {
	since time.Time
	shown shown
	host  string
}

// hostOf is where a connection comes from; "" for a Unix socket.
func hostOf(conn net.Conn) string {
	host, _, _ := net.SplitHostPort(conn.RemoteAddr().String())
	return host
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
// closed. One without an identity goes before one that has shown one, and the oldest first. One
// host does not shut the others out: what it has shown counts for nothing while it has more than
// half of the places.
func (y *lobby) admit(conn net.Conn) bool {
	y.mu.Lock()
	defer y.mu.Unlock()
	host := hostOf(conn)
	if len(y.in) >= y.most {
		oldest := y.oldest(func(v visit) bool {
			return v.shown < descriptionShown && time.Since(v.since) >= silenceMin
		})
		if oldest == nil {
			crowd := y.crowd()
			oldest = y.oldest(func(v visit) bool { return v.host == crowd && crowd != host })
		}
		if oldest == nil {
			return false
		}
		_ = oldest.Close()
		delete(y.in, oldest)
	}
	y.in[conn] = visit{since: time.Now(), host: host}
	return true
}

// oldest returns the connection that goes first of those that may go.
func (y *lobby) oldest(may func(visit) bool) (oldest net.Conn) {
	for c, v := range y.in {
		if !may(v) {
			continue
		}
		if o := y.in[oldest]; oldest == nil || v.shown < o.shown || v.shown == o.shown &&
			v.since.Before(o.since) {
			oldest = c
		}
	}
	return oldest
}

// crowd is the host that has more than half of the places; "-" where none has.
func (y *lobby) crowd() string {
	count := map[string]int{}
	for _, v := range y.in {
		if count[v.host]++; count[v.host] > y.most/2 {
			return v.host
		}
	}
	return "-"
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

// turns bounds the exchanges that run at a time, of which connections of one host have at most
// half: each may wait long for a peer that it is to connect back to.
type turns struct {
	most    int
	mu      sync.Mutex // guards what follows
	freed   sync.Cond
	running int
	of      map[string]int // by host
}

// take waits for a turn. It reports false when ctx ends first.
func (q *turns) take(ctx context.Context, host string) bool {
	defer context.AfterFunc(ctx, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.freed.Broadcast()
	})()
	q.mu.Lock()
	defer q.mu.Unlock()
	for ctx.Err() == nil && (q.running >= q.most || q.of[host] >= max(1, q.most/2)) {
		q.freed.Wait()
	}
	if ctx.Err() != nil {
		return false
	}
	q.running++
	q.of[host]++
	return true
}

func (q *turns) give(host string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.running--
	if q.of[host]--; q.of[host] == 0 {
		delete(q.of, host)
	}
	q.freed.Broadcast()
}
