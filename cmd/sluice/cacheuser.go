// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	enc "encoding/binary" // the tests have a variable of that name
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
)

// cacheUser is a client of a server on this host. It has an engine of its own and, after allocate,
// memory for blocks of one length. openModelUser returns one that uses the cache as a process does
// that serves a model; the content of its blocks follows from their keys.
type cacheUser struct {
	*serve.Client
	*serve.Space
	engine      *engine.Engine
	memory      *engine.Memory
	region      *engine.Region
	block, room int // bytes, and how many blocks the memory has room for
}

// dialCache connects an engine of that name to the server at a Unix socket.
func dialCache(ctx context.Context, socket, name string) (*cacheUser, error) {
	if strings.HasPrefix(socket, "tcp:") {
		return nil, usagef("it is no Unix socket: a server answers these commands on its own " +
			"host alone; others have its metrics")
	}
	socket = strings.TrimPrefix(socket, "unix:")
	conn, err := net.DialTimeout("unix", socket, time.Second)
	if err == nil {
		_ = conn.Close()
	} else if !errors.Is(err, syscall.EAGAIN) { // for which the engine tries again
		return nil, fmt.Errorf("no cache is served here: %w: start sluice cache serve, or name "+
			"its socket by --server", err)
	}
	b, err := byname.Open("shm", nil)
	if err != nil {
		return nil, err
	}
	u := &cacheUser{}
	u.engine, err = engine.Open(engine.Config{Name: name, Backends: []driver.Backend{b}})
	if err != nil {
		return nil, err
	}
	if u.Client, err = serve.Dial(ctx, u.engine, "unix", socket); err != nil {
		return nil, errors.Join(err, u.engine.Close())
	}
	return u, nil
}

// allocate allocates memory for n blocks, and lets the server reach it.
func (u *cacheUser) allocate(ctx context.Context, n, block int) (err error) {
	u.block, u.room = block, n
	u.memory, err = u.engine.Alloc(uint64(n*block), engine.AllocOptions{})
	if err != nil {
		return err
	}
	if u.region, err = u.engine.RegisterPrivate("blocks", u.memory.Segment()); err != nil {
		return err
	}
	return u.Attach(ctx, u.region)
}

// place is where the first n blocks lie.
func (u *cacheUser) place(n int) serve.Place {
	p := serve.Place{Region: u.region, Stride: uint64(u.block), Run: uint64(u.block)}
	for k := range n {
		p.Slots = append(p.Slots, uint32(k))
	}
	return p
}

// close ends a user. Memory that the server may still reach stays.
func (u *cacheUser) close() error {
	soon, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err := errors.Join(u.Client.Close(soon), u.engine.Close())
	if err == nil && u.memory != nil {
		err = u.memory.Close()
	}
	return err
}

// openModelUser connects a user with room for so many blocks to the cache at a Unix socket.
func openModelUser(ctx context.Context, socket, name string, block, room int) (*cacheUser, error) {
	u, err := dialCache(ctx, socket, name)
	if err != nil {
		return nil, err
	}
	if err = u.allocate(ctx, room, block); err == nil {
		u.Space, err = u.Namespace(ctx, "model", [32]byte{})
	}
	if err != nil {
		return nil, errors.Join(err, u.close())
	}
	return u, nil
}

// contentWord returns the 8 bytes at offset at of the block of a key.
func contentWord(key *cache.Key, at int) uint64 {
	a, b := enc.LittleEndian.Uint64(key[:]), enc.LittleEndian.Uint64(key[8:])
	v := (a + uint64(at)*0x9e3779b97f4a7c15) ^ b*0xd6e8feb86659fd93
	return v ^ v>>29
}

// fill writes the content of the keys to the first blocks.
func (u *cacheUser) fill(keys []cache.Key) {
	for k := range keys {
		p := u.memory.Bytes()[k*u.block:][:u.block]
		for at := 0; at+8 <= len(p); at += 8 {
			enc.LittleEndian.PutUint64(p[at:], contentWord(&keys[k], at))
		}
	}
}

// verify reports whether block k has the content of its key. It clears the block, so that the next
// Load cannot pass with the bytes of this one.
func (u *cacheUser) verify(k int, key *cache.Key) bool {
	p := u.memory.Bytes()[k*u.block:][:u.block]
	defer clear(p)
	for at := 0; at+8 <= len(p); at += 8 {
		if enc.LittleEndian.Uint64(p[at:]) != contentWord(key, at) {
			return false
		}
	}
	return true
}

// requestResult counts the blocks that a request loaded, those of them with wrong bytes, and those
// that it stored; took has the times of Match, Load and Store, 0 where there was none.
type requestResult struct {
	hits, wrong, stored int
	took                [3]time.Duration
}

// handle does with a request what a process that serves a model does: it loads the blocks that the
// cache has, and stores the others, as many at a time as the user has room for.
func (u *cacheUser) handle(ctx context.Context, keys []cache.Key) (r requestResult, err error) {
	begin := time.Now()
	m, err := u.Match(ctx, keys)
	r.took[0] = time.Since(begin)
	for at, end := 0, 0; err == nil && at < len(keys); at = end {
		what, call := 1, u.Load
		if end = min(at+u.room, m.Prefix); at >= m.Prefix {
			what, call, end = 2, u.Store, min(at+u.room, len(keys))
			u.fill(keys[at:end])
		}
		var outcomes []cache.Outcome
		begin := time.Now()
		for {
			outcomes, err = call(ctx, keys[at:end], u.place(end-at))
			if !errors.Is(err, engine.ErrBusy) || ctx.Err() != nil {
				break
			}
			time.Sleep(time.Millisecond) // the disks do not keep up
			begin = time.Now()
		}
		r.took[what] += time.Since(begin)
		for k, o := range outcomes {
			switch {
			case o != cache.Done:
			case what == 2:
				r.stored++
			default:
				r.hits++
				if !u.verify(k, &keys[at+k]) {
					r.wrong++
				}
			}
		}
	}
	return r, err
}

// ownServer is a server for this command alone: a child process and its files, until remove.
type ownServer struct {
	dir, memory, config string
	socket              string
	process             *exec.Cmd // nil before start
	stderr              figures.Tail
}

// newOwnServer writes the config of a server to a new folder. top, memory and disk are lines of its
// tables; without a disk the last is "".
func newOwnServer(folder, top, memory, disk string) (s *ownServer, err error) {
	s = &ownServer{}
	if s.dir, err = os.MkdirTemp(folder, "sluice-cache-*"); err != nil {
		return nil, err
	}
	s.memory = filepath.Join("/dev/shm", filepath.Base(s.dir))
	s.socket, s.config = filepath.Join(s.dir, "s"), filepath.Join(s.dir, "cache.toml")
	text := fmt.Sprintf("socket = %q\n%s\n[memory]\npath = %q\n%s\n", s.socket, top, s.memory,
		memory)
	if disk != "" {
		text += fmt.Sprintf("[[disk]]\npath = %q\n%s\n", filepath.Join(s.dir, "disk"), disk)
	}
	if err := os.WriteFile(s.config, []byte(text), 0o600); err != nil {
		return nil, errors.Join(err, s.remove())
	}
	return s, nil
}

// start starts the process, and returns the line that it says once clients may come.
func (s *ownServer) start() (line string, err error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	c := exec.Command(self, "cache", "serve", "--config", s.config)
	c.Stderr = &s.stderr
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		return "", fmt.Errorf("start a server: %w", err)
	}
	s.process = c
	if lines := bufio.NewScanner(out); lines.Scan() {
		return lines.Text(), nil
	}
	return "", fmt.Errorf("the server did not begin: %w: %s", s.process.Wait(),
		bytes.TrimSpace(s.stderr.Bytes()))
}

// remove ends the process if it has not ended, and removes the files.
func (s *ownServer) remove() error {
	if s.process != nil && s.process.ProcessState == nil {
		_ = s.process.Process.Kill()
		_ = s.process.Wait()
	}
	_ = os.Remove(s.memory)
	return os.RemoveAll(s.dir)
}
