// SPDX-License-Identifier: Apache-2.0

package events

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"maps"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

const (
	blockBytes = 4 << 10
	limit      = 2 * time.Minute
)

// node is a cache whose events are published.
type node struct {
	*cache.Cache
	*Publisher
	self   *engine.Peer
	remote *engine.Remote
}

func openNode(t *testing.T, blocks, buffer uint64) *node {
	dir := t.TempDir()
	memory, err := shm.New(shm.Config{})
	require.NoError(t, err)
	files, err := posix.New(posix.Config{})
	require.NoError(t, err)
	e, err := engine.Open(engine.Config{Name: "node", Plaintext: true,
		Backends: []driver.Backend{memory, files}})
	require.NoError(t, err)
	c, err := cache.Open(t.Context(), cache.Config{Engine: e, Blocks: 8192,
		Memory: cache.MemoryConfig{Path: filepath.Join(dir, "memory"), Bytes: blocks * blockBytes,
			Extent: 8 * blockBytes},
		Disks: []cache.DiskConfig{{Path: filepath.Join(dir, "disk"), Bytes: 64 << 20}}})
	require.NoError(t, err)
	mem, err := e.Alloc(blockBytes*64, engine.AllocOptions{})
	require.NoError(t, err)
	_, err = e.RegisterPrivate("kv", mem.Segment())
	require.NoError(t, err)
	n := &node{Cache: c}
	n.self, err = e.Self()
	require.NoError(t, err)
	n.remote, err = n.self.Remote("kv")
	require.NoError(t, err)
	cfg := Config{Cache: c, Topic: "kv@node", Buffer: buffer}
	cfg.Publish, err = net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	cfg.Replay, err = net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	n.Publisher, err = New(cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan error)
	go func() { ran <- n.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ran)
		require.NoError(t, c.Close())
		require.NoError(t, e.Close())
	})
	return n
}

func keysOf(from, n int) []cache.Key {
	keys := make([]cache.Key, n)
	for k := range keys {
		binary.BigEndian.PutUint64(keys[k][8:], uint64(from+k))
	}
	return keys
}

func (n *node) space(t *testing.T, name string) *cache.Namespace {
	s, err := n.Namespace(name, cache.NamespaceOptions{})
	require.NoError(t, err)
	return s
}

// put stores blocks, up to 64 at a time, from the memory of this process.
func (n *node) put(t *testing.T, s *cache.Namespace, keys []cache.Key) {
	for some := range slices.Chunk(keys, 64) {
		slots := make([]uint32, len(some))
		for k := range slots {
			slots[k] = uint32(k)
		}
		require.NoError(t, s.Store(t.Context(), some, cache.Place{Peer: n.self,
			Remote: n.remote, Stride: blockBytes, Run: blockBytes,
			Slots: slots}).Wait(t.Context()))
		require.NoError(t, n.Drain(t.Context()))
	}
}

// router is a subscriber. It follows the events by their numbers, and asks for what it has missed.
type router struct {
	t           *testing.T
	sub, replay *peer
	last        uint64
	held        map[cache.Key]string
	cleared     int
}

// dial opens a connection as a socket of a kind does.
func dial(t *testing.T, l net.Listener, kind string) *peer {
	t.Helper()
	conn, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	c, err := greet(conn, kind)
	require.NoError(t, err)
	require.NoError(t, conn.SetDeadline(time.Now().Add(limit)))
	return c
}

func openRouter(t *testing.T, n *node) *router {
	r := &router{t: t, sub: dial(t, n.cfg.Publish, "SUB"), replay: dial(t, n.cfg.Replay, "DEALER"),
		held: map[cache.Key]string{}}
	require.NoError(t, r.sub.send([]byte("\x01kv@")))
	r.next() // the first message has no events, and what was before it is missed
	return r
}

// message reads a message, whose last frame may be long.
func message(t *testing.T, c *peer) (frames [][]byte) {
	t.Helper()
	for {
		flags, err := c.in.ReadByte()
		require.NoError(t, err)
		size := make([]byte, 8)
		if flags&long == 0 {
			_, err = io.ReadFull(c.in, size[7:])
		} else {
			_, err = io.ReadFull(c.in, size)
		}
		require.NoError(t, err)
		body := make([]byte, be.Uint64(size))
		_, err = io.ReadFull(c.in, body)
		require.NoError(t, err)
		if frames = append(frames, body); flags&more == 0 {
			return frames
		}
	}
}

// ask takes a replay, and returns the numbers of its batches.
func (r *router) ask(from uint64) (numbers []uint64) {
	require.NoError(r.t, r.replay.send(nil, numbered(from)))
	for {
		m := message(r.t, r.replay)
		require.Len(r.t, m, 4)
		require.Empty(r.t, m[0])
		if be.Uint64(m[2]) == endOfReplay {
			require.Empty(r.t, m[3])
			return numbers
		}
		r.take(m[1:])
		numbers = append(numbers, r.last)
	}
}

// next takes the next message of the subscription, and what was missed before it.
func (r *router) next() {
	m := message(r.t, r.sub)
	require.Len(r.t, m, 3)
	number := be.Uint64(m[1])
	if number > r.last+1 {
		r.ask(r.last + 1)
	}
	if number > r.last {
		r.take(m)
	}
}

// until follows until the router holds what is said.
func (r *router) until(want map[cache.Key]string) {
	r.t.Helper()
	for !maps.Equal(want, r.held) {
		r.next()
	}
}

func (r *router) take(m [][]byte) {
	require.Equal(r.t, "kv@node", string(m[0]))
	r.last = be.Uint64(m[1])
	rest := m[2]
	batch, isArray := decode(r.t, &rest).([]any)
	require.True(r.t, isArray && len(batch) == 3 && len(rest) == 0)
	require.EqualValues(r.t, 0, batch[2])
	events, isArray := batch[1].([]any)
	require.True(r.t, isArray)
	for _, e := range events {
		e, isMap := e.(map[string]any)
		require.True(r.t, isMap)
		medium, _ := e["medium"].(string)
		hashes, _ := e["block_hashes"].([]any)
		switch e["type"] {
		case "AllBlocksCleared":
			clear(r.held)
			r.cleared++
		case "BlockStored":
			for _, h := range hashes {
				require.NotEqual(r.t, medium, r.held[cache.Key(h.([]byte))], "told twice")
				r.held[cache.Key(h.([]byte))] = medium
			}
		case "BlockRemoved":
			for _, h := range hashes {
				if key := cache.Key(h.([]byte)); r.held[key] == medium {
					delete(r.held, key)
				}
			}
		default:
			require.Fail(r.t, "no such event", "%v", e)
		}
	}
}

// decode reads a value of MessagePack, of the forms that a batch has.
func decode(t *testing.T, p *[]byte) any {
	take := func(n int) []byte {
		require.GreaterOrEqual(t, len(*p), n)
		got := (*p)[:n]
		*p = (*p)[n:]
		return got
	}
	array := func(n int) []any {
		list := make([]any, n)
		for k := range list {
			list[k] = decode(t, p)
		}
		return list
	}
	switch b := take(1)[0]; {
	case b < 0x80:
		return b
	case b < 0x90:
		m := map[string]any{}
		for range b & 15 {
			key, _ := decode(t, p).(string)
			m[key] = decode(t, p)
		}
		return m
	case b < 0xa0:
		return array(int(b & 15))
	case b < 0xc0:
		return string(take(int(b & 31)))
	case b == 0xc0:
		return nil
	case b == 0xc4:
		return take(int(take(1)[0]))
	case b == 0xcb:
		return math.Float64frombits(be.Uint64(take(8)))
	case b == 0xdd:
		return array(int(be.Uint32(take(4))))
	default:
		require.Fail(t, "no such form", "%#x", b)
		return nil
	}
}

// all are keys in one place.
func all(medium string, keys []cache.Key) map[cache.Key]string {
	m := map[cache.Key]string{}
	for _, key := range keys {
		m[key] = medium
	}
	return m
}

// TestRouter: a router knows what the cache has: as it comes and goes, under the fastest medium
// that has it, and where two namespaces have it until neither has. One that comes late learns it
// from a replay, also where the log has dropped what came before.
func TestRouter(t *testing.T) {
	for name, buffer := range map[string]uint64{"all": 1 << 20, "short log": 1} {
		t.Run(name, func(t *testing.T) {
			n := openNode(t, 256, buffer)
			r := openRouter(t, n)
			require.Equal(t, 1, r.cleared)
			a, b := n.space(t, "a"), n.space(t, "b")
			n.put(t, a, keysOf(0, 100))
			r.until(all("CPU", keysOf(0, 100)))

			_, err := a.Hint(keysOf(0, 40), cache.Hint{Kind: cache.HintDemote})
			require.NoError(t, err)
			want := all("CPU", keysOf(40, 60))
			maps.Copy(want, all("STORAGE", keysOf(0, 40)))
			r.until(want)

			n.put(t, b, keysOf(90, 20))
			maps.Copy(want, all("CPU", keysOf(100, 10)))
			r.until(want)
			require.NoError(t, a.Remove(keysOf(0, 100)))
			r.until(all("CPU", keysOf(90, 20)))

			late := openRouter(t, n)
			require.Equal(t, r.held, late.held)
			numbers := late.ask(0)
			for r.last < numbers[len(numbers)-1] {
				r.next()
			}
			require.Equal(t, r.held, late.held)
			require.Empty(t, late.ask(late.last+1))
			if buffer == 1 {
				require.Len(t, numbers, 1, "one takes the place of all")
			} else {
				require.Equal(t, n.base, numbers[0])
			}
			require.NoError(t, b.Remove(keysOf(90, 20)))
			r.until(nil)
			late.until(nil)
		})
	}
}

// TestRestart: a router that has followed a node learns from the next one that its blocks are gone.
func TestRestart(t *testing.T) {
	first := openNode(t, 64, 0)
	r := openRouter(t, first)
	first.put(t, first.space(t, "a"), keysOf(0, 10))
	r.until(all("CPU", keysOf(0, 10)))
	second := openNode(t, 64, 0)
	require.Greater(t, second.base, r.last)
	next := openRouter(t, second)
	next.held, next.last = r.held, r.last
	next.ask(next.last + 1)
	require.Empty(t, next.held)
	// So does one that has followed a process whose clock was ahead.
	late := openRouter(t, second)
	late.held, late.last = all("CPU", keysOf(0, 10)), math.MaxUint64>>1
	require.Equal(t, second.base, late.ask(late.last + 1)[0])
	require.Empty(t, late.held)
}

// TestLost: where the cache has dropped events, routers learn what it has all the same: each change
// once, without a moment at which they know nothing.
func TestLost(t *testing.T) {
	n := openNode(t, 256, 0)
	r := openRouter(t, n)
	s := n.space(t, "a")
	n.put(t, s, keysOf(0, 64))
	r.until(all("CPU", keysOf(0, 64)))
	n.mu.Lock() // its reader stands still, and 4,096 events may wait for it
	for round := range 40 {
		n.put(t, s, keysOf(100+round*64, 64))
		require.NoError(t, s.Remove(keysOf(100+round*64, 64)))
	}
	require.NoError(t, s.Remove(keysOf(0, 32)))
	n.mu.Unlock()
	r.until(all("CPU", keysOf(32, 32)))
	require.Equal(t, 1, r.cleared)
}

// TestSlowSubscriber: one that does not read holds nobody up.
func TestSlowSubscriber(t *testing.T) {
	n := openNode(t, 256, 1)
	slow, r := openRouter(t, n), openRouter(t, n)
	s := n.space(t, "a")
	for round := range 100 {
		n.put(t, s, keysOf(round, 1))
		require.NoError(t, s.Remove(keysOf(round, 1)))
	}
	n.put(t, s, keysOf(1000, 8))
	r.until(all("CPU", keysOf(1000, 8)))
	slow.ask(0)
	require.Equal(t, r.held, slow.held)
}

// openPipe returns a Publisher without a cache, whose log has some batches, and a function that has
// a peer talk to it. The other end of that is what it returns; ended has how the talk did.
func openPipe(t *testing.T, batches int) (p *Publisher,
	talk func(func(context.Context, *peer) error) (c *peer, ended chan error)) {
	p = &Publisher{cfg: Config{Topic: "kv", Buffer: 1 << 20}, base: 1, first: 1,
		room: make(chan struct{}, replaysMax), held: map[block]place{}, grown: make(chan struct{})}
	for range batches {
		p.append(bytes.Repeat([]byte{1}, 100))
	}
	return p, func(of func(context.Context, *peer) error) (*peer, chan error) {
		near, far := net.Pipe()
		t.Cleanup(func() { _ = far.Close() })
		ended := make(chan error, 1)
		go func() {
			defer near.Close()
			ended <- of(t.Context(), &peer{Conn: near, in: bufio.NewReader(near),
				topics: map[string]int{}, wants: make(chan struct{}, 1)})
		}()
		return &peer{Conn: far, in: bufio.NewReader(far)}, ended
	}
}

// TestSlowReplays: replays that take a few bytes a second have their places for some seconds each.
func TestSlowReplays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var readers sync.WaitGroup
		t.Cleanup(readers.Wait) // behind the end of all connections
		p, talk := openPipe(t, 1000)
		for range replaysMax {
			slow, _ := talk(p.replays)
			require.NoError(t, slow.send(nil, numbered(0)))
			readers.Go(func() {
				b := make([]byte, 10)
				for {
					if _, err := slow.Conn.Read(b); err != nil {
						return
					}
					time.Sleep(time.Second)
				}
			})
		}
		synctest.Wait()
		require.Len(t, p.room, replaysMax)
		begin := time.Now()
		quick, _ := talk(p.replays)
		require.NoError(t, quick.send(nil, numbered(0)))
		n := 0
		for m := message(t, quick); be.Uint64(m[2]) != endOfReplay; m = message(t, quick) {
			n++
		}
		require.Equal(t, 1000, n)
		require.Less(t, time.Since(begin), 2*replayTime)
	})
}

// TestIdle: a peer that wants nothing has its place for some time. One that has subscribed keeps
// it.
func TestIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, talk := openPipe(t, 1)
		_, unsubscribed := talk(p.feed)
		_, unasked := talk(p.replays)
		r, subscribed := talk(p.feed)
		require.NoError(t, r.send([]byte("\x01k")))
		require.Len(t, message(t, r), 3)
		require.ErrorIs(t, <-unsubscribed, engine.ErrTimeout)
		require.ErrorIs(t, <-unasked, os.ErrDeadlineExceeded)
		time.Sleep(time.Hour)
		require.Empty(t, subscribed)
		p.mu.Lock()
		p.append([]byte("more"))
		p.mu.Unlock()
		require.Equal(t, "more", string(message(t, r)[2]))
		require.NoError(t, r.Close())
		require.Error(t, <-subscribed)
	})
}

// TestNoRoomForAReader: a Publisher that gets no events says so, and closes its listeners.
func TestNoRoomForAReader(t *testing.T) {
	n := openNode(t, 64, 0)
	for full := false; !full; {
		select {
		case _, open := <-n.Events(t.Context()):
			full = !open
		default:
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p, err := New(Config{Cache: n.Cache, Publish: l})
	require.NoError(t, err)
	require.ErrorIs(t, p.Run(t.Context()), engine.ErrFull)
	require.ErrorIs(t, l.Close(), net.ErrClosed)
}

// TestStrangers: peers that speak something else, or too much, are left, and others are not.
func TestStrangers(t *testing.T) {
	n := openNode(t, 64, 0)
	for _, l := range []net.Listener{n.cfg.Publish, n.cfg.Replay} {
		for _, text := range []string{"GET / HTTP/1.1\r\n" + strings.Repeat("x: y\r\n", 20),
			"\xff" + strings.Repeat("\x00", 8) + "\x7f\x01" + strings.Repeat("\x00", 100)} {
			conn, err := net.Dial("tcp", l.Addr().String())
			require.NoError(t, err)
			require.NoError(t, conn.SetDeadline(time.Now().Add(limit)))
			_, err = conn.Write([]byte(text))
			require.NoError(t, err)
			_, err = io.Copy(io.Discard, conn)
			require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
			_ = conn.Close()
		}
		for _, frames := range [][]byte{
			append([]byte{long}, numbered(1<<40)...),
			bytes.Repeat([]byte{more, 0}, framesMax+1),
		} {
			c := dial(t, l, "DEALER")
			_, err := c.Write(frames)
			require.NoError(t, err)
			_, err = io.Copy(io.Discard, c.in)
			require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
		}
	}
	// What is no request is passed over, a PING is answered.
	r := openRouter(t, n)
	require.NoError(t, r.replay.send([]byte("1"), []byte("2"), []byte("3")))
	require.NoError(t, r.replay.write(frame(command, []byte("\x04PING\x00\x10ab"))))
	flags, body, err := r.replay.read()
	require.NoError(t, err)
	require.EqualValues(t, command, flags)
	require.Equal(t, "\x04PONGab", string(body))
	require.Equal(t, n.base, r.ask(0)[0])
}
