// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"time"
)

// The baseline of notifications: the same number of bytes over a Unix socket, to
// a goroutine that waits in Read. It stands for what a program does that has
// shared memory, and a socket to say that something is in it.

// interruptible makes ctx end the waits on c; call what it returns afterwards.
func interruptible(ctx context.Context, c net.Conn) func() bool {
	return context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
}

func socketError(ctx context.Context, what string, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// SendSocketStamps is SendStamps over a socket.
func SendSocketStamps(ctx context.Context, c net.Conn, size uint64, count int,
	pause time.Duration) error {
	defer interruptible(ctx, c)()
	msg := make([]byte, max(size, stampLen))
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for range count {
		<-tick.C
		now, err := clock()
		if err != nil {
			return err
		}
		binary.LittleEndian.PutUint64(msg, uint64(now))
		if _, err := c.Write(msg); err != nil {
			return socketError(ctx, "send a stamp", err)
		}
	}
	return nil
}

// ReceiveSocketStamps is ReceiveStamps over a socket.
func ReceiveSocketStamps(ctx context.Context, c net.Conn, size uint64, count int) (*Samples,
	error) {
	defer interruptible(ctx, c)()
	msg := make([]byte, max(size, stampLen))
	s := NewSamples(count)
	for range count {
		if _, err := io.ReadFull(c, msg); err != nil {
			return nil, socketError(ctx, "receive a stamp", err)
		}
		now, err := clock()
		if err != nil {
			return nil, err
		}
		s.Add(time.Duration(now - int64(binary.LittleEndian.Uint64(msg))))
	}
	return s, nil
}

// SocketPingPong is PingPong over a socket.
func SocketPingPong(ctx context.Context, c net.Conn, size uint64, count int) (*Samples, error) {
	defer interruptible(ctx, c)()
	msg := make([]byte, size)
	s := NewSamples(count)
	for range count {
		start := time.Now()
		if _, err := c.Write(msg); err != nil {
			return nil, socketError(ctx, "send a ping", err)
		}
		if _, err := io.ReadFull(c, msg); err != nil {
			return nil, socketError(ctx, "await a pong", err)
		}
		s.Add(time.Since(start))
	}
	return s, nil
}

// SocketPong is Pong over a socket.
func SocketPong(ctx context.Context, c net.Conn, size uint64, count int) error {
	defer interruptible(ctx, c)()
	msg := make([]byte, size)
	for range count {
		if _, err := io.ReadFull(c, msg); err != nil {
			return socketError(ctx, "await a ping", err)
		}
		if _, err := c.Write(msg); err != nil {
			return socketError(ctx, "send a pong", err)
		}
	}
	return nil
}
