// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"

	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/bench"
)

// socketsEnd moves as many bytes as an operation has over bare sockets: TCP over the loopback on
// lane tcp, Unix sockets on lane host. For each part of a write the target answers with one byte.
// The bytes are one run in a buffer at both ends, so that no protocol has to say where pieces
// belong; the slots of an operation are not used. A message goes over one more connection, on which
// a goroutine of the receiver sleeps in read.
type socketsEnd struct {
	base
	count    int // connections for bytes
	listen   net.Listener
	buffer   []byte        // of the initiator
	conns    []net.Conn    // of the initiator; the last is messages
	accepted chan net.Conn // of the target: it gets messages from there
	messages net.Conn      // the connection for messages
}

// socketPart is the least number of bytes that a connection carries of an operation: with shorter
// parts fewer connections are faster.
const socketPart = 64 << 10

func newSockets(args []string) (end, error) {
	e := &socketsEnd{count: tcp.ConnsDefault, accepted: make(chan net.Conn, 1)}
	if len(args) == 0 {
		return e, nil
	}
	var err error
	if e.count, err = strconv.Atoi(args[0]); err != nil || e.count < 1 || len(args) > 1 {
		return nil, errors.New("want at most one argument, a number of connections")
	}
	return e, nil
}

// Open implements bench.End.
func (e *socketsEnd) Open(r *bench.Request) (a bench.Answer, err error) {
	network, address := "tcp", "127.0.0.1:0"
	switch bench.Lane(r.Lane) {
	case bench.TCP, bench.CacheTCP:
	case bench.Host:
		network, address = "unix", fmt.Sprintf("@sluice-bench-%d", os.Getpid())
	default:
		return a, fmt.Errorf("it is for lanes %s and %s: %w", bench.Host, bench.TCP,
			bench.ErrUnsupported)
	}
	if r.Threads > 1 {
		return a, fmt.Errorf("its connections carry one operation at a time: %w",
			bench.ErrUnsupported)
	}
	a.Version, a.Settings = "the kernel", fmt.Sprintf("%d %s connections, scattered pieces as one "+
		"run, messages by sleeping", e.count, network)
	if r.Role == bench.RoleInitiator {
		return a, nil
	}
	if e.listen, err = net.Listen(network, address); err != nil {
		return a, err
	}
	go e.accept()
	a.Card = network + " " + e.listen.Addr().String()
	return a, nil
}

// A request on a connection is one byte, its kind, and eight, the number of bytes.
const (
	socketWrite   = 'w'
	socketRead    = 'r'
	socketMessage = 'm' // the connection is the one for messages
	socketHeader  = 9
)

// accept serves the connections of the initiator, until the initiator closes them.
func (e *socketsEnd) accept() {
	for {
		c, err := e.listen.Accept()
		if err != nil {
			return
		}
		go func() {
			request, part := make([]byte, socketHeader), []byte(nil)
			for err := error(nil); err == nil; {
				if _, err = io.ReadFull(c, request); err != nil {
					break
				}
				if n := binary.LittleEndian.Uint64(request[1:]); uint64(len(part)) != n {
					part = make([]byte, n)
				}
				switch request[0] {
				case socketMessage:
					e.accepted <- c
					return
				case socketRead:
					_, err = c.Write(part)
				default:
					if _, err = io.ReadFull(c, part); err == nil {
						_, err = c.Write(request[:1])
					}
				}
			}
			c.Close()
		}()
	}
}

// Connect implements bench.End. The target does nothing: it accepts what the initiator dials.
func (e *socketsEnd) Connect(card string) error {
	if e.listen != nil {
		return nil
	}
	var network, address string
	if _, err := fmt.Sscan(card, &network, &address); err != nil {
		return fmt.Errorf("read the card: %w", err)
	}
	for range e.count + 1 {
		c, err := net.Dial(network, address)
		if err != nil {
			return err
		}
		e.conns = append(e.conns, c)
	}
	e.messages = e.conns[e.count]
	_, err := e.messages.Write(header(socketMessage, 0))
	return err
}

func header(kind byte, n uint64) []byte {
	return binary.LittleEndian.AppendUint64([]byte{kind}, n)
}

// Prepare implements bench.End.
func (e *socketsEnd) Prepare(op string, size uint64, local, _ []int32) (bench.Posting, error) {
	if op == bench.OpDurable {
		return nil, errDurable
	}
	bytes := size * uint64(len(local))
	conns := e.conns[:min(uint64(e.count), max(1, bytes/socketPart))]
	if uint64(len(e.buffer)) < bytes {
		e.buffer = make([]byte, bytes)
	}
	errs := make([]error, len(conns))
	move := func(i int) {
		n := uint64(len(conns))
		part := e.buffer[bytes*uint64(i)/n : bytes*uint64(i+1)/n]
		if op == bench.OpRead {
			if _, errs[i] = conns[i].Write(header(socketRead, uint64(len(part)))); errs[i] == nil {
				_, errs[i] = io.ReadFull(conns[i], part)
			}
			return
		}
		buffers := net.Buffers{header(socketWrite, uint64(len(part))), part}
		if _, errs[i] = buffers.WriteTo(conns[i]); errs[i] == nil {
			_, errs[i] = io.ReadFull(conns[i], make([]byte, 1))
		}
	}
	return posting(func(context.Context) error {
		var others sync.WaitGroup
		for i := range conns[1:] {
			others.Go(func() { move(i + 1) })
		}
		move(0)
		others.Wait()
		return errors.Join(errs...)
	}), nil
}

// Notify implements bench.End.
func (e *socketsEnd) Notify(message []byte) error {
	_, err := e.messageConn().Write(append(header(socketMessage, uint64(len(message))),
		message...))
	return err
}

// messageConn returns the connection for messages. The target waits for it.
func (e *socketsEnd) messageConn() net.Conn {
	if e.messages == nil {
		e.messages = <-e.accepted
	}
	return e.messages
}

// Receive implements bench.End.
func (e *socketsEnd) Receive() (bool, error) {
	c, head := e.messageConn(), make([]byte, socketHeader)
	if _, err := io.ReadFull(c, head); err != nil {
		return false, err
	}
	_, err := io.CopyN(io.Discard, c, int64(binary.LittleEndian.Uint64(head[1:])))
	return err == nil, err
}

func (e *socketsEnd) close() {
	for _, c := range append(e.conns, e.messages) {
		if c != nil {
			c.Close()
		}
	}
	if e.listen != nil {
		e.listen.Close()
	}
}
