// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bytes"
	"net"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// slowLine relays connections to an owner. Each way brings what it was given `delay` later, and
// stands still now and then, as TCP does that has lost a packet. It returns the owner's
// address at this end.
func slowLine(t *testing.T, owner *Backend, delay, stall time.Duration) []byte {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", owner.listener.Addr().String())
			if err != nil {
				_ = near.Close()
				continue
			}
			go relaySlowly(far, near, delay, stall)
			go relaySlowly(near, far, delay, stall)
		}
	}()
	a := owner.address
	a.places = []string{l.Addr().String()}
	addr, err := a.encode()
	if err != nil {
		t.Fatal(err)
	}
	return addr
}

func relaySlowly(to, from net.Conn, delay, stall time.Duration) {
	type packet struct {
		due  time.Time
		data []byte
	}
	line := make(chan packet, 64)
	go func() {
		defer to.Close()
		for p := range line {
			time.Sleep(time.Until(p.due))
			if _, err := to.Write(p.data); err != nil {
				break
			}
		}
		for range line { // until the reader has noticed
		}
	}()
	defer close(line)
	defer from.Close()
	for i := 0; ; i++ {
		data := make([]byte, 64<<10)
		n, err := from.Read(data)
		if err != nil || n == 0 {
			return
		}
		if i%50 == 49 {
			time.Sleep(stall)
		}
		line <- packet{time.Now().Add(delay), data[:n]}
	}
}

// A line on which bytes are older than Grace most of the time costs time, and nothing else.
func TestSlowLine(t *testing.T) {
	leak.Check(t)
	const n = 8 << 20
	cfg := Config{Grace: 50 * time.Millisecond}
	owner, near := open(t, cfg), open(t, cfg)
	m, away := share(t, owner, n)
	l, local := share(t, near, n)
	p := dial(t, near, slowLine(t, owner, 10*time.Millisecond, 60*time.Millisecond))
	key := take(t, p, m)
	for round, op := range []driver.Op{driver.Write, driver.Read, driver.Write} {
		fill(local, byte(10+round))
		want := byte(10 + round)
		if op == driver.Read {
			fill(away, 99)
			want = 99
		}
		for i := range uint64(8) {
			d := []driver.Desc{{Local: i * n / 8, Remote: i * n / 8, Len: n / 8, LocalKey: l.key, RemoteKey: key}}
			if err := p.Submit(i, &driver.Batch{Op: op, Descs: d}); err != nil {
				t.Fatal(err)
			}
		}
		ended := map[uint64]error{}
		var done [8]driver.Completion
		for end := time.Now().Add(3 * limit); len(ended) < 8 && time.Now().Before(end); time.Sleep(time.Millisecond) {
			k, _ := near.Poll(done[:])
			for _, c := range done[:k] {
				ended[c.Tag] = c.Err
				if c.Err != nil {
					t.Errorf("%v over a slow line: %v", op, c.Err)
				}
			}
		}
		if len(ended) < 8 {
			t.Fatalf("%v over a slow line: %d of 8 completed", op, len(ended))
		}
		if bytes.Count(local, []byte{want}) != n || !bytes.Equal(local, away) {
			t.Errorf("%v over a slow line: the bytes differ", op)
		}
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}
