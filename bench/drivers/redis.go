// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/kv/cache"
)

// redisEnd has Redis stand beside a cache: the target runs a server that keeps all in memory, over
// a Unix socket on lane cache-shm and over the loopback on cache-tcp. A read is an MGET, a write an
// MSET, a match an EXISTS.
type redisEnd struct {
	base
	server *exec.Cmd
	folder string
	memory []byte
	conn   net.Conn
	in     *bufio.Reader
}

// Open implements bench.End.
func (e *redisEnd) Open(r *bench.Request) (a bench.Answer, err error) {
	if err := onlyLane(r, bench.CacheShm, bench.CacheTCP); err != nil {
		return a, err
	}
	if r.Threads > 1 {
		return a, fmt.Errorf("its connection carries one operation at a time: %w",
			bench.ErrUnsupported)
	}
	a.Version, a.Settings = "redis-server of the system", "MGET, MSET and EXISTS over a "+
		"connection, nothing saved to a disk"
	if r.Role == bench.RoleInitiator {
		e.memory = make([]byte, r.Bytes)
		return a, nil
	}
	if e.folder, err = os.MkdirTemp("", "sluice-bench-redis-"); err != nil {
		return a, err
	}
	socket := e.folder + "/s"
	args := []string{"--save", "", "--appendonly", "no", "--dir", e.folder, "--port", "0",
		"--unixsocket", socket}
	a.Card = "unix " + socket
	if r.Lane == string(bench.CacheTCP) {
		l, err := net.Listen("tcp", "127.0.0.1:0") // which port is free
		if err != nil {
			return a, err
		}
		_, port, _ := net.SplitHostPort(l.Addr().String())
		a.Card = "tcp " + l.Addr().String()
		l.Close()
		args = append(args, "--port", port, "--bind", "127.0.0.1")
	}
	e.server = exec.Command("redis-server", args...)
	e.server.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return a, e.server.Start()
}

// Memory implements bench.End.
func (e *redisEnd) Memory() []byte { return e.memory }

// Connect implements bench.End. It waits until the server listens.
func (e *redisEnd) Connect(card string) (err error) {
	if card == "" {
		return nil
	}
	network, address, _ := strings.Cut(card, " ")
	for begin := time.Now(); ; {
		if e.conn, err = net.Dial(network, address); err == nil {
			e.in = bufio.NewReaderSize(e.conn, 64<<10)
			return nil
		}
		if time.Since(begin) > patience/2 {
			return fmt.Errorf("redis-server does not listen: %w", err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// Keyed implements bench.Keyed.
func (e *redisEnd) Keyed() {}

// Prepare implements bench.End.
func (e *redisEnd) Prepare(op string, size uint64, local, remote []int32) (bench.Posting, error) {
	if op == bench.OpDurable {
		return nil, errDurable
	}
	keys, values := keysOf(remote), pieces(e.memory, local, size)
	post := func(op string) error { return e.post(op, keys, values) }
	return posting(func(context.Context) error { return post(op) }), proven(op, values, keys, post)
}

// post sends a command, an array of strings each behind its length, and reads the reply.
func (e *redisEnd) post(op string, keys []cache.Key, values [][]byte) error {
	words := [][]byte{[]byte(map[string]string{bench.OpRead: "MGET", bench.OpWrite: "MSET",
		bench.OpMatch: "EXISTS"}[op])}
	for i := range keys {
		if words = append(words, keys[i][:]); op == bench.OpWrite {
			words = append(words, values[i])
		}
	}
	all := net.Buffers{fmt.Appendf(nil, "*%d\r\n", len(words))}
	for _, w := range words {
		all = append(all, fmt.Appendf(nil, "$%d\r\n", len(w)), w, []byte("\r\n"))
	}
	if _, err := all.WriteTo(e.conn); err != nil {
		return err
	}
	switch op {
	case bench.OpWrite:
		return e.reply("+OK")
	case bench.OpMatch:
		return e.reply(fmt.Sprint(":", len(keys)))
	}
	err := e.reply(fmt.Sprint("*", len(keys)))
	for i := range values {
		if err == nil {
			err = e.reply(fmt.Sprint("$", len(values[i])))
		}
		if err == nil {
			_, err = io.ReadFull(e.in, values[i])
		}
		if err == nil {
			_, err = e.in.Discard(len("\r\n"))
		}
	}
	return err
}

// reply reads a line, which must be that one.
func (e *redisEnd) reply(want string) error {
	line, err := e.in.ReadString('\n')
	if line = strings.TrimSuffix(line, "\r\n"); err == nil && line != want {
		err = fmt.Errorf("redis answered %.200q in place of %q", line, want)
	}
	return err
}

func (e *redisEnd) close() {
	if e.conn != nil {
		e.conn.Close()
	}
	if e.server != nil {
		_ = e.server.Process.Kill()
		_ = e.server.Wait()
	}
	os.RemoveAll(e.folder)
}
