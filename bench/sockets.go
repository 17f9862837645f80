// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// SocketsName is how results call bare sockets.
const SocketsName = "sockets"

// socketPart is the least that a connection of the baseline carries of a batch: below that one
// connection is quicker than several.
const socketPart = 64 << 10

// sockets moves as many bytes as a batch over bare TCP connections on the loopback, between two
// buffers of this process. A byte comes back for each part of a write, and asks for each of a read.
// Scattered pieces stand beside the same bytes in one run: no program without a protocol is faster.
type sockets struct {
	ctx   context.Context
	write bool
	near  []net.Conn
	parts [][]byte // of each connection
	errs  []error
	stop  func() bool // what ctx would do
	far   sync.WaitGroup
}

// newSockets opens the connections. Call close in the end.
func newSockets(ctx context.Context, s *Shape, conns int) (*sockets, error) {
	bytes := s.BatchBytes()
	conns = int(min(uint64(conns), max(1, bytes/socketPart)))
	c := &sockets{ctx: ctx, write: s.Op == driver.Write, errs: make([]error, conns)}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen for %s: %w", SocketsName, err)
	}
	defer l.Close()
	for i := range conns {
		a, b, err := socketPair(ctx, l)
		if err != nil {
			c.close()
			return nil, fmt.Errorf("connect %s: %w", SocketsName, err)
		}
		part := bytes / uint64(conns)
		if i == 0 {
			part += bytes % uint64(conns)
		}
		c.near = append(c.near, a)
		c.parts = append(c.parts, make([]byte, part))
		c.far.Go(func() { answer(b, make([]byte, part), c.write) })
	}
	c.stop = context.AfterFunc(ctx, c.hangUp)
	return c, nil
}

// socketPair makes a connection to a listener of this process.
func socketPair(ctx context.Context, l net.Listener) (a, b net.Conn, err error) {
	if a, err = (&net.Dialer{}).DialContext(ctx, "tcp", l.Addr().String()); err != nil {
		return nil, nil, err
	}
	if b, err = l.Accept(); err != nil {
		return nil, nil, errors.Join(err, a.Close())
	}
	return a, b, nil
}

// answer is the other end of a connection, until that is closed.
func answer(far net.Conn, mem []byte, write bool) {
	defer far.Close()
	in, out := mem, make([]byte, 1)
	if !write {
		in, out = out, in
	}
	for {
		if _, err := io.ReadFull(far, in); err != nil {
			return
		}
		if _, err := far.Write(out); err != nil {
			return
		}
	}
}

// hangUp closes our end of each connection, which ends reads and writes on both sides.
func (c *sockets) hangUp() {
	for _, near := range c.near {
		_ = near.Close()
	}
}

func (c *sockets) close() {
	if c.stop != nil {
		c.stop()
	}
	c.hangUp()
	c.far.Wait()
}

// do implements copier.
func (c *sockets) do(int) error {
	var all sync.WaitGroup
	for i := range c.near[1:] {
		all.Go(func() { c.errs[i+1] = c.move(i + 1) })
	}
	c.errs[0] = c.move(0)
	all.Wait()
	if err := errors.Join(c.errs...); err != nil {
		return socketError(c.ctx, "move bytes over "+SocketsName, err)
	}
	return nil
}

func (c *sockets) move(i int) error {
	var one [1]byte
	out, in := c.parts[i], one[:]
	if !c.write {
		out, in = in, out
	}
	if _, err := c.near[i].Write(out); err != nil {
		return err
	}
	_, err := io.ReadFull(c.near[i], in)
	return err
}
