// SPDX-License-Identifier: Apache-2.0

package events

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// The sockets speak ZMTP 3.0 (https://rfc.zeromq.org/spec/23/) without security, as far as a PUB
// and a ROUTER that listen need it.

const (
	peersMax      = 64 // of a socket
	frameMax      = 255
	subscriptions = 64               // of a peer
	framesMax     = 8                // of a message that a peer sends
	helloTime     = 10 * time.Second // for the greeting, and again for a subscription
	idleTime      = 5 * time.Minute  // in which a peer that may ask for replays asks for one
	sendTime      = 30 * time.Second // for one message

	more, long, command = 1, 2, 4 // flags of a frame
)

// peer is a connection.
type peer struct {
	net.Conn
	in *bufio.Reader

	mu     sync.Mutex // guards topics
	topics map[string]int
	wants  chan struct{} // has one where topics have changed

	sending sync.Mutex // of one message
	due     time.Time  // by which it has taken what is sent, zero for none; its sender's
}

// serve runs talk for each peer that connects, until ctx ends, and closes the listener.
func serve(ctx context.Context, l net.Listener, kind string,
	talk func(context.Context, *peer) error) error {
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	defer l.Close()
	var peers sync.WaitGroup
	defer peers.Wait()
	room := make(chan struct{}, peersMax)
	for {
		conn, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("events: %w", err)
		case err != nil: // no more files: others may end
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		select {
		case room <- struct{}{}:
		default:
			_ = conn.Close()
			continue
		}
		peers.Go(func() {
			defer func() { <-room }()
			defer conn.Close()
			defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
			if c, err := greet(conn, kind); err == nil {
				_ = talk(ctx, c) // it ends with the connection, whose other end says why
			}
		})
	}
}

// greet opens a connection: each side says that it speaks version 3 without security, and what its
// socket is.
func greet(conn net.Conn, kind string) (*peer, error) {
	c := &peer{Conn: conn, in: bufio.NewReader(conn), topics: map[string]int{},
		wants: make(chan struct{}, 1)}
	_ = conn.SetDeadline(time.Now().Add(helloTime))
	hello := make([]byte, 64)
	hello[0], hello[9], hello[10] = 0xff, 0x7f, 3
	copy(hello[12:], "NULL")
	if _, err := conn.Write(hello); err != nil {
		return nil, err
	}
	theirs := make([]byte, len(hello))
	if _, err := io.ReadFull(c.in, theirs); err != nil {
		return nil, err
	}
	if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 ||
		!bytes.Equal(theirs[12:32], hello[12:32]) {
		return nil, fmt.Errorf("no ZMTP 3 without security: %w", engine.ErrCorrupt)
	}
	ready := append([]byte("\x05READY\x0bSocket-Type\x00\x00\x00"), byte(len(kind)))
	if err := c.write(frame(command, append(ready, kind...))); err != nil {
		return nil, err
	}
	flags, body, err := c.read()
	if err == nil && (flags&command == 0 || !bytes.HasPrefix(body, ready[:6])) {
		err = fmt.Errorf("no READY: %w", engine.ErrCorrupt)
	}
	_ = conn.SetDeadline(time.Time{})
	return c, err
}

// frame returns the head of a frame, and its body.
func frame(flags byte, body []byte) net.Buffers {
	if len(body) > 255 {
		return net.Buffers{be.AppendUint64([]byte{flags | long}, uint64(len(body))), body}
	}
	return net.Buffers{{flags, byte(len(body))}, body}
}

// read reads a frame. Peers have no reason to send long ones.
func (c *peer) read() (flags byte, body []byte, err error) {
	head := make([]byte, 2)
	if _, err = io.ReadFull(c.in, head); err != nil {
		return 0, nil, err
	}
	if head[0]&long != 0 {
		return 0, nil, fmt.Errorf("a frame of more than %d bytes: %w", frameMax, engine.ErrBounds)
	}
	body = make([]byte, head[1])
	_, err = io.ReadFull(c.in, body)
	return head[0], body, err
}

// receive reads a message, and answers the PINGs before it.
func (c *peer) receive() (frames [][]byte, err error) {
	for {
		flags, body, err := c.read()
		if err != nil {
			return nil, err
		}
		if flags&command != 0 {
			// PING has a time of two bytes, then what PONG repeats.
			if ping := []byte("\x04PING"); bytes.HasPrefix(body, ping) && len(body) >= 7 {
				err = c.write(frame(command, append([]byte("\x04PONG"), body[7:]...)))
			}
			if err != nil {
				return nil, err
			}
			continue
		}
		if frames = append(frames, body); len(frames) > framesMax {
			return nil, fmt.Errorf("a message of more than %d frames: %w", framesMax,
				engine.ErrBounds)
		}
		if flags&more == 0 {
			return frames, nil
		}
	}
}

// send sends a message.
func (c *peer) send(frames ...[]byte) error {
	var all net.Buffers
	for n, f := range frames {
		flags := byte(more)
		if n == len(frames)-1 {
			flags = 0
		}
		all = append(all, frame(flags, f)...)
	}
	return c.write(all)
}

func (c *peer) write(all net.Buffers) error {
	c.sending.Lock()
	defer c.sending.Unlock()
	due := time.Now().Add(sendTime)
	if !c.due.IsZero() && c.due.Before(due) {
		due = c.due
	}
	_ = c.SetWriteDeadline(due)
	_, err := all.WriteTo(c.Conn)
	return err
}

// readSubscriptions reads what a subscriber wants, until the connection ends: a message of 1 and
// the beginning of a topic, or of 0 to take one back.
func (c *peer) readSubscriptions() error {
	for {
		frames, err := c.receive()
		if err != nil {
			return err
		}
		if len(frames[0]) == 0 {
			continue
		}
		what, topic := frames[0][0], string(frames[0][1:])
		c.mu.Lock()
		switch {
		case what == 1 && (c.topics[topic] > 0 || len(c.topics) < subscriptions):
			c.topics[topic]++
		case what == 0 && c.topics[topic] > 1:
			c.topics[topic]--
		case what == 0:
			delete(c.topics, topic)
		}
		c.mu.Unlock()
		select {
		case c.wants <- struct{}{}:
		default:
		}
	}
}

// subscribed reports whether a peer wants a topic.
func (c *peer) subscribed(topic string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for want := range c.topics {
		if strings.HasPrefix(topic, want) {
			return true
		}
	}
	return false
}
