// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
	"github.com/sluicehq/sluice/kv/cache"
)

const blockBytes, blocks = 8 << 10, 64

func openEngine(name string, change ...func(*engine.Config)) (*engine.Engine, error) {
	b, err := shm.New(shm.Config{})
	if err != nil {
		return nil, err
	}
	cfg := engine.Config{Name: name, Plaintext: true, Backends: []driver.Backend{b}}
	for _, f := range change {
		f(&cfg)
	}
	return engine.Open(cfg)
}

// openServer serves a cache at a path, until the test ends.
func openServer(t *testing.T) (*cache.Cache, string) {
	c, _, path := openWhole(t)
	return c, path
}

// openNode opens a cache in a folder, its server, and the socket there.
func openNode(folder string, change ...func(*Config)) (*Server, net.Listener, error) {
	e, err := openEngine("node")
	if err != nil {
		return nil, nil, err
	}
	c, err := cache.Open(context.Background(), cache.Config{Engine: e, Memory: cache.MemoryConfig{
		Path: filepath.Join(folder, "memory"), Bytes: 32 * blockBytes,
		Extent: 8 * blockBytes}, Blocks: 64})
	if err != nil {
		return nil, nil, err
	}
	cfg := Config{Cache: c, Engine: e}
	for _, f := range change {
		f(&cfg)
	}
	s, err := New(cfg)
	if err != nil {
		return nil, nil, err
	}
	l, err := net.Listen("unix", filepath.Join(folder, "s"))
	return s, l, err
}

func openWhole(t *testing.T, change ...func(*Config)) (*cache.Cache, *Server, string) {
	s, l, err := openNode(t.TempDir(), change...)
	require.NoError(t, err)
	c, e := s.cfg.Cache, s.cfg.Engine
	ctx, cancel := context.WithCancel(context.Background())
	served, ran := make(chan error), make(chan error)
	go func() { served <- e.Serve(ctx, l) }()
	go func() { ran <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-served
		require.NoError(t, <-ran)
		require.NoError(t, c.Close())
		require.NoError(t, e.Close())
	})
	return c, s, l.Addr().String()
}

// user is a client with memory of blocks.
type user struct {
	*Client
	*Space
	mem    []byte
	region *engine.Region
}

func openUser(ctx context.Context, path string) (*user, error) {
	e, err := openEngine("user")
	if err != nil {
		return nil, err
	}
	m, err := e.Alloc(blocks*blockBytes, engine.AllocOptions{})
	if err != nil {
		return nil, err
	}
	u := &user{mem: m.Bytes()}
	if u.region, err = e.RegisterPrivate("kv", m.Segment()); err != nil {
		return nil, err
	}
	if u.Client, err = Dial(ctx, e, "unix", path); err != nil {
		return nil, err
	}
	u.grace = time.Minute // as long as a slow machine takes
	if err = u.Attach(ctx, u.region); err != nil {
		return nil, err
	}
	u.Space, err = u.Client.Namespace(ctx, "model", [32]byte{1})
	return u, err
}

func keysOf(from, n uint64) []cache.Key {
	keys := make([]cache.Key, n)
	for k := range keys {
		binary.BigEndian.PutUint64(keys[k][8:], from+uint64(k))
	}
	return keys
}

func (u *user) place(from, n int) Place {
	p := Place{Region: u.region, Stride: blockBytes, Run: blockBytes}
	for k := range n {
		p.Slots = append(p.Slots, uint32(from+k))
	}
	return p
}

// fill has each block of a call be what its key says.
func (u *user) fill(keys []cache.Key) {
	for k, key := range keys {
		copy(u.mem[k*blockBytes:][:blockBytes], bytes.Repeat(key[:], blockBytes/16))
	}
}

// storeAndLoad stores blocks, loads them into other places, and compares.
func (u *user) storeAndLoad(t *testing.T, keys []cache.Key) {
	n := len(keys)
	u.fill(keys)
	outcomes, err := u.Store(t.Context(), keys, u.place(0, n))
	require.NoError(t, err)
	require.Equal(t, all(cache.Done, n), outcomes)
	outcomes, err = u.Load(t.Context(), keys, u.place(n, n))
	require.NoError(t, err)
	require.Equal(t, all(cache.Done, n), outcomes)
	require.Equal(t, u.mem[:n*blockBytes], u.mem[n*blockBytes:2*n*blockBytes])
}

// awaitStop returns once a process stands still by SIGSTOP.
func awaitStop(t *testing.T, child *exec.Cmd) {
	var status unix.WaitStatus
	_, err := unix.Wait4(child.Process.Pid, &status, unix.WUNTRACED, nil)
	require.NoError(t, err)
	require.True(t, status.Stopped())
}

func until(is func() bool) {
	for !is() {
		runtime.Gosched()
	}
}

func all(o cache.Outcome, n int) []cache.Outcome {
	list := make([]cache.Outcome, n)
	for k := range list {
		list[k] = o
	}
	return list
}

func TestClient(t *testing.T) {
	ctx := t.Context()
	c, path := openServer(t)
	u, err := openUser(ctx, path)
	require.NoError(t, err)
	keys := keysOf(1, 8)
	u.fill(keys)
	outcomes, err := u.Store(ctx, keys, u.place(0, 8))
	require.NoError(t, err)
	require.Equal(t, all(cache.Done, 8), outcomes)

	other, err := openUser(ctx, path) // another process of the same model, but for the process
	require.NoError(t, err)
	found, err := other.Match(ctx, keysOf(1, 10))
	require.NoError(t, err)
	require.Equal(t, 8, found.Prefix)
	outcomes, err = other.Load(ctx, keysOf(1, 10), other.place(20, 10))
	require.NoError(t, err)
	require.Equal(t, append(all(cache.Done, 8), cache.Missing, cache.Missing), outcomes)
	require.Equal(t, u.mem[:8*blockBytes], other.mem[20*blockBytes:][:8*blockBytes])
	require.NoError(t, other.Remove(ctx, keys[3:4]))
	found, err = u.Match(ctx, keys)
	require.NoError(t, err)
	require.Equal(t, 3, found.Prefix)

	apart, err := u.Client.Namespace(ctx, "model", [32]byte{2})
	require.NoError(t, err)
	found, err = apart.Match(ctx, keys)
	require.NoError(t, err)
	require.Equal(t, 0, found.Prefix)

	// what cannot be is told
	_, err = u.Load(ctx, keys, u.place(blocks-2, 8))
	require.ErrorIs(t, err, engine.ErrBounds)
	_, err = u.Client.Namespace(ctx, "", [32]byte{})
	require.ErrorIs(t, err, engine.ErrBounds)
	_, err = u.Store(ctx, make([]cache.Key, keysMax+1), u.place(0, keysMax+1))
	require.ErrorIs(t, err, engine.ErrBounds)
	require.NoError(t, u.Detach(ctx, u.region))
	_, err = u.Load(ctx, keys, u.place(0, 8))
	require.ErrorIs(t, err, engine.ErrBounds)

	require.NoError(t, u.Drain(ctx)) // of no disks
	require.NoError(t, u.Client.Close(ctx))
	require.NoError(t, other.Client.Close(ctx))
	require.EqualValues(t, 8*blockBytes, c.Stats().LoadedBytes)
}

// TestCancel: a context that ends takes a request back, and the client learns that nothing moves.
func TestCancel(t *testing.T) {
	c, s, path := openWhole(t)
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	u.fill(keysOf(1, 4))
	ctx, cancel := context.WithCancel(t.Context())
	standing := testpoint.Stand(t, "cache: entered")[0]
	ended := make(chan error)
	go func() {
		_, err := u.Store(ctx, keysOf(1, 4), u.place(0, 4))
		ended <- err
	}()
	<-standing.Came
	cancel()
	select {
	case err := <-ended:
		t.Fatal("before the cache is done:", err)
	default:
	}
	for taken := false; !taken; { // until the server has the word
		s.mu.Lock()
		for _, c := range s.clients {
			taken = len(c.ends) == 0
		}
		s.mu.Unlock()
		runtime.Gosched()
	}
	standing.GoOn()
	require.ErrorIs(t, <-ended, context.Canceled)
	require.EqualValues(t, 4, c.Stats().Stores[cache.Late])
	require.NoError(t, u.Client.Close(t.Context()))
}

// TestUnproven: without the word of the server a Load may move bytes still, and its error says so.
// Detach has the proof, while the server does as before.
func TestUnproven(t *testing.T) {
	_, s, path := openWhole(t)
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	keys := keysOf(1, 4)
	u.fill(keys)
	_, err = u.Store(t.Context(), keys, u.place(0, 4))
	require.NoError(t, err)
	clear(u.mem)
	standing := testpoint.Stand(t, "cache: pinned")[0]
	u.grace = 0
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		_, err := u.Load(ctx, keys, u.place(0, 4))
		ended <- err
	}()
	<-standing.Came
	cancel()
	err = <-ended
	require.ErrorIs(t, err, engine.ErrUnproven)
	require.ErrorIs(t, err, context.Canceled)
	require.NoError(t, u.Detach(t.Context(), u.region))
	standing.GoOn()
	until(func() bool { return s.Report().Running == 0 })
	require.Equal(t, make([]byte, len(u.mem)), u.mem)
	require.NoError(t, u.Client.Close(t.Context()))
}

// TestLostInALoad: the end of the connection is no proof that the server moves no bytes any more.
// Once the region is detached it is one.
func TestLostInALoad(t *testing.T) {
	_, s, path := openWhole(t)
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	keys := keysOf(1, 4)
	u.fill(keys)
	_, err = u.Store(t.Context(), keys, u.place(0, 4))
	require.NoError(t, err)
	clear(u.mem)
	standing := testpoint.Stand(t, "cache: pinned")[0]
	ended := make(chan error)
	go func() {
		_, err := u.Load(t.Context(), keys, u.place(0, 4))
		ended <- err
	}()
	<-standing.Came
	require.NoError(t, u.peer.Close())
	err = <-ended
	require.ErrorIs(t, err, engine.ErrUnproven)
	require.ErrorIs(t, err, engine.ErrPeerLost)
	_, err = u.Load(t.Context(), keys, u.place(0, 4)) // that was not sent
	require.ErrorIs(t, err, engine.ErrPeerLost)
	require.NotErrorIs(t, err, engine.ErrUnproven)
	require.NoError(t, u.Detach(t.Context(), u.region))
	standing.GoOn()
	until(func() bool { return s.Report().Running == 0 })
	require.Equal(t, make([]byte, len(u.mem)), u.mem)
	require.NoError(t, u.Client.Close(t.Context()))
}

// TestGivenUp: requests whose context has ended count until the server has answered them: it never
// has more than it answers.
func TestGivenUp(t *testing.T) {
	goOn := make(chan struct{})
	_, s, path := openWhole(t, func(c *Config) {
		c.Options = func(name string) (o cache.NamespaceOptions) {
			if name == "slow" {
				<-goOn
			}
			return o
		}
	})
	answer := sync.OnceFunc(func() { close(goOn) })
	t.Cleanup(answer)
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	other, err := openUser(t.Context(), path)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	for range requestsMax {
		go func() {
			_, err := u.Client.Namespace(ctx, "slow", [32]byte{})
			ended <- err
		}()
	}
	until(func() bool { return s.Report().Running == requestsMax })
	cancel()
	for range requestsMax {
		require.ErrorIs(t, <-ended, context.Canceled)
	}
	soon, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if len(u.Client.room) == requestsMax { // else cancel has cut a word that may have come
		_, err = u.Match(soon, keysOf(1, 4))
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
	require.Equal(t, requestsMax, s.Report().Running)

	// What all clients ask for is bounded, too.
	bound := func(most int) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.most = most
	}
	bound(1)
	_, err = other.Match(t.Context(), keysOf(1, 4))
	require.ErrorIs(t, err, engine.ErrBusy)
	bound(8192) // of which a client may have a quarter
	_, err = other.Match(t.Context(), keysOf(1, 128))
	require.NoError(t, err)
	until(func() bool { return s.Report().Running == requestsMax }) // its bytes count no more
	go func() {
		_, err := other.Client.Namespace(t.Context(), "slow", [32]byte{})
		ended <- err
	}()
	until(func() bool { return s.Report().Running == requestsMax+1 })
	_, err = other.Match(t.Context(), keysOf(1, 128))
	require.ErrorIs(t, err, engine.ErrBusy)
	require.ErrorContains(t, err, "of this client")
	bound(bytesMax)
	_, err = other.Match(t.Context(), keysOf(1, 128))
	require.NoError(t, err)
	bound(1)
	require.NoError(t, other.Space.Close(), "what gives something back is not refused")
	bound(bytesMax)
	answer()
	require.NoError(t, <-ended)
	require.NoError(t, other.Client.Close(t.Context()))
	_, err = u.Match(t.Context(), keysOf(1, 4))
	require.NoError(t, err)
	require.NoError(t, u.Client.Close(t.Context()))
}

// A client that has its answers may ask again, however many of the goroutines that sent them have
// not run since.
func TestAnswersThatLeft(t *testing.T) {
	_, path := openServer(t)
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	goOn := make(chan struct{})
	testpoint.Set(func(point string) {
		if point == "cache server: answered" {
			<-goOn
		}
	})
	t.Cleanup(func() { testpoint.Set(nil) })
	t.Cleanup(sync.OnceFunc(func() { close(goOn) }))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range 4 * requestsMax {
		_, err := u.Match(ctx, keysOf(1, 4))
		require.NoError(t, err)
	}
}

// A program that asks for more than a Client does is refused, and one that takes no answers gets no
// more of them.
func TestTooManyRequests(t *testing.T) {
	goOn := make(chan struct{})
	_, s, path := openWhole(t, func(c *Config) {
		c.Options = func(name string) (o cache.NamespaceOptions) {
			if name == "slow" {
				<-goOn
			}
			return o
		}
	})
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	u.Client.room = make(chan struct{}, 4*requestsMax)
	var slow sync.WaitGroup
	for range 2 * requestsMax {
		slow.Go(func() { _, _ = u.Client.Namespace(t.Context(), "slow", [32]byte{}) })
	}
	until(func() bool { return s.Report().Running == 2*requestsMax })
	_, err = u.Match(t.Context(), keysOf(1, 4))
	require.ErrorIs(t, err, engine.ErrBusy)
	require.ErrorContains(t, err, "requests of this client run")
	close(goOn)
	slow.Wait()

	until(func() bool { return s.Report().Running == 0 })
	parked := make(chan struct{})
	testpoint.Set(func(point string) {
		if point == "cache server: answered" {
			<-parked
		}
	})
	t.Cleanup(func() { testpoint.Set(nil) })
	t.Cleanup(sync.OnceFunc(func() { close(parked) }))
	for range answersMax {
		_, err := u.Match(t.Context(), keysOf(1, 4))
		require.NoError(t, err)
	}
	soon, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = u.Match(soon, keysOf(1, 4))
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

// TestDroppedClient: one whose connection the server has given up learns it, though its own stands.
func TestDroppedClient(t *testing.T) {
	_, s, path := openWhole(t)
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	s.mu.Lock()
	for _, c := range s.clients {
		c.cancel()
	}
	s.mu.Unlock()
	for err == nil {
		_, err = u.Match(t.Context(), keysOf(1, 4))
	}
	require.ErrorIs(t, err, engine.ErrPeerLost)
	require.NoError(t, u.Client.Close(t.Context()))
}

// TestAnswerTooLong: a client learns that it takes no answer so long.
func TestAnswerTooLong(t *testing.T) {
	_, s, path := openWhole(t)
	e, err := openEngine("short", func(c *engine.Config) { c.NotifyMax = 1 << 10 })
	require.NoError(t, err)
	c, err := Dial(t.Context(), e, "unix", path)
	require.NoError(t, err)
	to := make(chan []byte, 1)
	c.room <- struct{}{}
	c.mu.Lock()
	c.waiting[7] = to
	c.mu.Unlock()
	s.mu.Lock()
	for _, of := range s.clients {
		go s.send(of, 7, nil, make([]byte, 64<<10))
	}
	s.mu.Unlock()
	_, err = readAnswer(<-to)
	require.ErrorIs(t, err, engine.ErrBounds)
	require.NoError(t, c.Close(t.Context()))
	require.NoError(t, e.Close())
}

// TestGarbage: no message makes the server fail.
func TestGarbage(t *testing.T) {
	_, path := openServer(t)
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		p := make([]byte, r.IntN(80))
		for k := range p {
			p[k] = byte(r.Uint32())
		}
		if len(p) > 0 {
			p[0] = byte(r.IntN(int(kindAnswered) + 2))
		}
		if len(p) > headBytes+6 && r.IntN(4) > 0 { // namespace 0, and few keys
			clear(p[headBytes:][:6])
			p[headBytes+2] = byte(r.IntN(5))
		}
		require.NoError(t, u.peer.Notify(t.Context(), p))
	}
	for { // the server may be busy with them
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		_, err = u.Match(ctx, keysOf(1, 4))
		cancel()
		if err == nil {
			break
		}
		if !errors.Is(err, engine.ErrBusy) {
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
	}
	require.NoError(t, u.Client.Close(t.Context()))
}

const (
	childVariable = "SLUICE_TEST_CLIENT"
	nodeVariable  = "SLUICE_TEST_NODE"
	pointVariable = "SLUICE_TEST_POINT"
)

func TestMain(m *testing.M) {
	if path, ok := os.LookupEnv(childVariable); ok {
		fmt.Fprintln(os.Stderr, useForEver(path))
		os.Exit(1)
	}
	if folder, ok := os.LookupEnv(nodeVariable); ok {
		fmt.Fprintln(os.Stderr, serveForEver(folder))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// serveForEver is a node which stops itself once, where its first call is at a step.
func serveForEver(folder string) error {
	s, l, err := openNode(folder)
	if err != nil {
		return err
	}
	testpoint.First(os.Getenv(pointVariable), testpoint.StopProcess)
	go func() { _ = s.cfg.Engine.Serve(context.Background(), l) }()
	fmt.Println("serves")
	return s.Run(context.Background())
}

func useForEver(path string) error {
	ctx := context.Background()
	u, err := openUser(ctx, path)
	if err != nil {
		return err
	}
	for from := uint64(0); ; from = (from + 8) % 64 {
		keys := keysOf(from, 8)
		u.fill(keys)
		if _, err := u.Store(ctx, keys, u.place(0, 8)); err != nil {
			return err
		}
		_, err := u.Hint(ctx, keys, cache.Hint{Kind: cache.HintRetain, For: time.Second})
		if err != nil && !errors.Is(err, cache.ErrNoRoom) { // a namespace may keep four
			return err
		}
		if _, err := u.Load(ctx, keys, u.place(8, 8)); err != nil {
			return err
		}
		fmt.Println(from)
	}
}

// TestClientKilledInALoad: what a client has kept by a Load goes with it, what it has retained by
// its time: blocks of others may take all the room then.
func TestClientKilledInALoad(t *testing.T) {
	c, s, path := openWhole(t)
	standing := testpoint.Stand(t, "cache: pinned")[0]
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), childVariable+"="+path)
	child.Stderr = os.Stderr
	require.NoError(t, child.Start())
	<-standing.Came // in its first Load
	require.NotZero(t, c.Stats().Held)
	require.NoError(t, child.Process.Kill())
	require.Error(t, child.Wait())
	standing.GoOn()
	until(func() bool { return s.Report().Running == 0 && c.Stats().Held == 0 })
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	keys := keysOf(1000, 32) // as many as the memory has room for
	u.fill(keys)
	outcomes, err := u.Store(t.Context(), keys, u.place(0, 32))
	require.NoError(t, err)
	require.Equal(t, all(cache.Done, 32), outcomes)
	found, err := u.Match(t.Context(), keys)
	require.NoError(t, err)
	require.Equal(t, 32, found.Prefix)
	require.NoError(t, u.Client.Close(t.Context()))
	require.Zero(t, c.Stats().Unproven)
}

// TestStoppedClient stops a client by SIGSTOP while the server is at each step of its call: another
// client is served meanwhile. Then it goes on, or is killed as it stands, and keeps nothing.
func TestStoppedClient(t *testing.T) {
	for _, point := range []string{"cache: reserved", "cache: entered", "cache: landed",
		"cache: summed", "cache: committed", "cache: pinned"} {
		for _, goOn := range []bool{true, false} {
			t.Run(fmt.Sprint(point, " goes on ", goOn), func(t *testing.T) {
				c, s, path := openWhole(t)
				u, err := openUser(t.Context(), path)
				require.NoError(t, err)
				standing := testpoint.Stand(t, point)[0]
				child := exec.Command(os.Args[0])
				child.Env = append(os.Environ(), childVariable+"="+path)
				out, err := child.StdoutPipe()
				require.NoError(t, err)
				child.Stderr = os.Stderr
				require.NoError(t, child.Start())
				<-standing.Came
				require.NoError(t, child.Process.Signal(unix.SIGSTOP))
				awaitStop(t, child)
				standing.GoOn()

				u.storeAndLoad(t, keysOf(1000, 8))

				if goOn {
					require.NoError(t, child.Process.Signal(unix.SIGCONT))
					lines := bufio.NewScanner(out)
					for range 3 {
						require.True(t, lines.Scan())
					}
				}
				require.NoError(t, child.Process.Kill())
				require.Error(t, child.Wait())
				until(func() bool { return s.Report().Running == 0 })
				if !goOn { // else what it has retained meanwhile stays for its time
					until(func() bool { return c.Stats().Held == 0 })
				}
				require.NoError(t, u.Client.Close(t.Context()))
				require.Zero(t, c.Stats().Unproven)
			})
		}
	}
}

// TestStoppedServer stops a server by SIGSTOP at each step of a call. While the server stands,
// Detach gives the caller its memory back for good; once that goes on, it serves it again.
func TestStoppedServer(t *testing.T) {
	for _, point := range []string{"cache: reserved", "cache: entered", "cache: landed",
		"cache: summed", "cache: committed", "cache: pinned"} {
		t.Run(point, func(t *testing.T) {
			folder := t.TempDir()
			child := exec.Command(os.Args[0])
			child.Env = append(os.Environ(), nodeVariable+"="+folder, pointVariable+"="+point)
			out, err := child.StdoutPipe()
			require.NoError(t, err)
			child.Stderr = os.Stderr
			require.NoError(t, child.Start())
			defer func() { _ = child.Process.Kill(); _ = child.Wait() }()
			require.True(t, bufio.NewScanner(out).Scan())
			u, err := openUser(t.Context(), filepath.Join(folder, "s"))
			require.NoError(t, err)

			keys := keysOf(0, 8)
			u.fill(keys)
			ctx, cancel := context.WithCancel(t.Context())
			u.grace = 50 * time.Millisecond // nothing answers
			ended := make(chan error)
			go func() {
				_, err := u.Store(ctx, keys, u.place(0, 8))
				if err == nil {
					_, err = u.Load(ctx, keys, u.place(8, 8))
				}
				ended <- err
			}()
			awaitStop(t, child)
			cancel()
			require.ErrorIs(t, <-ended, engine.ErrUnproven)
			require.NoError(t, u.Detach(t.Context(), u.region))
			mine := bytes.Repeat([]byte{0xaa}, len(u.mem))
			copy(u.mem, mine)

			require.NoError(t, child.Process.Signal(unix.SIGCONT))
			until(func() bool {
				r, err := u.Report(t.Context())
				require.NoError(t, err)
				return r.Running == 1 // this one
			})
			require.Equal(t, mine, u.mem)
			u.grace = time.Minute
			require.NoError(t, u.Attach(t.Context(), u.region))
			u.storeAndLoad(t, keysOf(100, 8))
			r, err := u.Report(t.Context())
			require.NoError(t, err)
			require.Zero(t, r.Unproven)
			require.NoError(t, u.Client.Close(t.Context()))
		})
	}
}

// TestKilledClient: clients are killed while they store and load; the server goes on, serves no
// byte that was not stored, and keeps nothing of them.
func TestKilledClient(t *testing.T) {
	c, path := openServer(t)
	for range 6 {
		child := exec.Command(os.Args[0])
		child.Env = append(os.Environ(), childVariable+"="+path)
		out, err := child.StdoutPipe()
		require.NoError(t, err)
		child.Stderr = os.Stderr
		require.NoError(t, child.Start())
		lines := bufio.NewScanner(out)
		for range 5 {
			require.True(t, lines.Scan())
		}
		require.NoError(t, child.Process.Kill())
		require.Error(t, child.Wait())
	}
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	keys := keysOf(0, 32)
	outcomes, err := u.Load(t.Context(), keys, u.place(0, 32))
	require.NoError(t, err)
	for k, o := range outcomes {
		require.Contains(t, []cache.Outcome{cache.Done, cache.Missing}, o)
		if o == cache.Done {
			require.Equal(t, bytes.Repeat(keys[k][:], blockBytes/16),
				u.mem[k*blockBytes:][:blockBytes])
		}
	}
	require.NoError(t, u.Client.Close(t.Context()))
	require.Zero(t, c.Stats().Unproven)
	until(func() bool { return c.Stats().Held == 0 })
}

// TestLimits: what one client may have is bounded, and it learns so.
func TestLimits(t *testing.T) {
	c, path := openServer(t)
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	part := func(k int) *engine.Region {
		e := u.group.e
		r, err := e.RegisterPrivate(fmt.Sprint("part ", k), driver.Segment{Kind: driver.DRAM,
			Len: blockBytes, Mem: u.mem[k*blockBytes:][:blockBytes]})
		require.NoError(t, err)
		return r
	}
	var spaces []*Space
	for k := range 63 { // beside the one that it has
		space, err := u.Client.Namespace(t.Context(), "model", [32]byte{2, byte(k)})
		require.NoError(t, err)
		spaces = append(spaces, space)
		require.NoError(t, u.Attach(t.Context(), part(k)))
	}
	_, err = u.Client.Namespace(t.Context(), "model", [32]byte{3})
	require.ErrorIs(t, err, engine.ErrBusy)
	require.Len(t, c.Spaces(), 64, "the cache has no name that the client has not")
	again, err := u.Client.Namespace(t.Context(), "model", [32]byte{1})
	require.NoError(t, err)
	require.Equal(t, u.Space, again)
	require.NoError(t, again.Close()) // one of its two opens
	_, err = u.Client.Namespace(t.Context(), "model", [32]byte{3})
	require.ErrorIs(t, err, engine.ErrBusy)
	require.NoError(t, spaces[0].Close())
	require.NoError(t, spaces[0].Close())
	_, err = spaces[0].Match(t.Context(), keysOf(1, 1))
	require.ErrorIs(t, err, engine.ErrBounds)
	another, err := u.Client.Namespace(t.Context(), "model", [32]byte{3})
	require.NoError(t, err)
	_, err = spaces[0].Match(t.Context(), keysOf(1, 1))
	require.ErrorIs(t, err, engine.ErrBounds, "it has no number that was another one's")
	require.NoError(t, another.Remove(t.Context(), keysOf(1, 1)))
	last := part(63)
	require.ErrorIs(t, u.Attach(t.Context(), last), engine.ErrBusy)
	require.Equal(t, 64, u.group.e.Stats().Leases)
	for range 70 { // what it has detached is none of those
		require.NoError(t, u.Detach(t.Context(), u.region))
		require.NoError(t, u.Attach(t.Context(), u.region))
	}
	u.fill(keysOf(1, 4))
	outcomes, err := u.Store(t.Context(), keysOf(1, 4), u.place(0, 4))
	require.NoError(t, err)
	require.Equal(t, all(cache.Done, 4), outcomes)
	require.NoError(t, u.Client.Close(t.Context()))
	require.Zero(t, u.group.e.Stats().Leases)

	// names of clients that have gone, and left no blocks, make way
	for k := range 20 {
		u, err = openUser(t.Context(), path)
		require.NoError(t, err)
		for i := range 63 {
			for { // until the server has seen the end of the one before
				_, err = u.Client.Namespace(t.Context(), "of many", [32]byte{byte(k), byte(i)})
				if !errors.Is(err, cache.ErrNoRoom) {
					break
				}
			}
			require.NoError(t, err)
		}
		require.NoError(t, u.Client.Close(t.Context()))
	}
}

// TestOptions: a server without Options leaves those that the program has set.
func TestOptions(t *testing.T) {
	c, path := openServer(t)
	_, err := c.Namespace("model", cache.NamespaceOptions{Geometry: [32]byte{1}, Priority: 5})
	require.NoError(t, err)
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	require.Equal(t, 5, c.Spaces()[0].Priority)
	require.NoError(t, u.Client.Close(t.Context()))
}

// TestAttachTwice: a region has one lease, however often it is attached: Detach ends all that the
// server may do with it.
func TestAttachTwice(t *testing.T) {
	_, path := openServer(t)
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			if err := u.Attach(t.Context(), u.region); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	require.Equal(t, 1, u.group.e.Stats().Leases)
	require.NoError(t, u.Detach(t.Context(), u.region))
	require.Zero(t, u.group.e.Stats().Leases)
	require.NoError(t, u.Attach(t.Context(), u.region))
	require.NoError(t, u.Client.Close(t.Context()))
	require.Zero(t, u.group.e.Stats().Leases)
}

// TestNamesOfAllClients: clients together do not take all names of a cache; those that another one
// has open, or that one gives back by its end, are free to all.
func TestNamesOfAllClients(t *testing.T) {
	_, s, path := openWhole(t)
	s.names = 2
	first, err := openUser(t.Context(), path) // has "model"
	require.NoError(t, err)
	second, err := openUser(t.Context(), path)
	require.NoError(t, err)
	a, err := first.Client.Namespace(t.Context(), "a", [32]byte{})
	require.NoError(t, err)
	_, err = second.Client.Namespace(t.Context(), "b", [32]byte{})
	require.ErrorIs(t, err, cache.ErrNoRoom)
	require.ErrorContains(t, err, "2 namespaces open")
	_, err = second.Client.Namespace(t.Context(), "a", [32]byte{})
	require.NoError(t, err)
	require.NoError(t, a.Close()) // the second one has it still
	_, err = first.Client.Namespace(t.Context(), "b", [32]byte{})
	require.ErrorIs(t, err, cache.ErrNoRoom)
	require.NoError(t, first.Client.Close(t.Context()))
	require.NoError(t, second.Client.Close(t.Context()))
	until(func() bool { return s.Report().Clients == 0 })
	third, err := openUser(t.Context(), path)
	require.NoError(t, err)
	_, err = third.Client.Namespace(t.Context(), "b", [32]byte{})
	require.NoError(t, err)
	require.NoError(t, third.Client.Close(t.Context()))
}

// TestSpaceThatCloses: a namespace that a client closes while a request of it runs is given back
// with the request's end, and so is one whose number comes when nobody waits for it any more.
func TestSpaceThatCloses(t *testing.T) {
	_, s, path := openWhole(t)
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	open := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.open)
	}
	standing := testpoint.Stand(t, "cache: reserved")[0]
	stored := make(chan error, 1)
	go func() {
		outcomes, err := u.Store(t.Context(), keysOf(1, 1), u.place(0, 1))
		if err == nil && outcomes[0] != cache.Done {
			err = errors.New(outcomes[0].String())
		}
		stored <- err
	}()
	<-standing.Came
	require.NoError(t, u.Space.Close())
	require.Equal(t, 1, open())
	standing.GoOn()
	require.NoError(t, <-stored)
	until(func() bool { return open() == 0 })

	s.opening.Lock() // so that the answer is late
	ctx, cancel := context.WithCancel(t.Context())
	asked := make(chan error, 1)
	go func() {
		_, err := u.Client.Namespace(ctx, "late", [32]byte{})
		asked <- err
	}()
	until(func() bool { return s.Report().Running == 1 })
	cancel()
	require.ErrorIs(t, <-asked, context.Canceled)
	s.opening.Unlock()
	until(func() bool { return s.Report().Running == 0 && open() == 0 })

	space, err := u.Client.Namespace(t.Context(), "busy", [32]byte{})
	require.NoError(t, err)
	for range requestsMax { // as requests do that are not answered
		u.Client.room <- struct{}{}
	}
	require.ErrorIs(t, space.Close(), context.DeadlineExceeded)
	require.Equal(t, 1, open())
	for range requestsMax {
		<-u.Client.room
	}
	until(func() bool { return open() == 0 })
	require.NoError(t, u.Client.Close(t.Context()))
}

// TestReplace: of blocks that two clients replace at a time a third one finds one of each as a
// whole, and of all that are removed none.
func TestReplace(t *testing.T) {
	_, path := openServer(t)
	keys := keysOf(1, 4)
	var writers sync.WaitGroup
	for w := range 2 {
		u, err := openUser(t.Context(), path)
		require.NoError(t, err)
		writers.Go(func() {
			for k := range 50 {
				for i := range u.mem[:4*blockBytes] {
					u.mem[i] = byte(2*k + w)
				}
				outcomes, err := u.Replace(t.Context(), keys, u.place(0, 4))
				require.NoError(t, err)
				require.Equal(t, all(cache.Done, 4), outcomes)
			}
			require.NoError(t, u.Client.Close(t.Context()))
		})
	}
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	load := func() (done int) {
		outcomes, err := u.Load(t.Context(), keys, u.place(0, 4))
		require.NoError(t, err)
		for k, o := range outcomes {
			if o == cache.Done {
				p := u.mem[k*blockBytes:][:blockBytes]
				require.Equal(t, bytes.Repeat(p[:1], blockBytes), p, "parts of two blocks")
				done++
			}
		}
		return done
	}
	until(func() bool { return load() == 4 })
	for range 50 {
		require.Equal(t, 4, load())
	}
	writers.Wait()
	require.Equal(t, 4, load())
	require.NoError(t, u.Remove(t.Context(), keys))
	require.Zero(t, load())
	require.NoError(t, u.Client.Close(t.Context()))
}

// TestNamesOfAClientThatEnds: a client that is gone has its names while a request of it runs.
func TestNamesOfAClientThatEnds(t *testing.T) {
	_, s, path := openWhole(t)
	s.names = 2
	first, err := openUser(t.Context(), path) // has "model"
	require.NoError(t, err)
	_, err = first.Client.Namespace(t.Context(), "a", [32]byte{})
	require.NoError(t, err)
	m, err := first.group.e.Alloc(blockBytes, engine.AllocOptions{})
	require.NoError(t, err)
	region, err := first.group.e.RegisterPrivate("more", m.Segment())
	require.NoError(t, err)
	standing := testpoint.Stand(t, "serve: imported")[0]
	attached := make(chan error, 1)
	go func() { attached <- first.Attach(t.Context(), region) }()
	<-standing.Came
	require.NoError(t, first.peer.Close())
	require.Error(t, <-attached)
	until(func() bool { return s.Report().Clients == 0 })

	second, err := openUser(t.Context(), path)
	require.NoError(t, err)
	_, err = second.Client.Namespace(t.Context(), "b", [32]byte{})
	require.ErrorIs(t, err, cache.ErrNoRoom)
	standing.GoOn()
	until(func() bool {
		_, err = second.Client.Namespace(t.Context(), "b", [32]byte{})
		return err == nil
	})
	require.NoError(t, second.Client.Close(t.Context()))
}

// TestRegionThatWasDetached: the server refuses what names a region that its client has given up,
// however old the request is, and asks nothing of the client's memory for it: also where the client
// has attached another region since.
func TestRegionThatWasDetached(t *testing.T) {
	_, path := openServer(t)
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	u.mu.Lock()
	was := u.regions[u.region]
	u.mu.Unlock()
	require.NoError(t, u.Detach(t.Context(), u.region))
	_, err = u.Store(t.Context(), keysOf(1, 1), u.place(0, 1))
	require.ErrorContains(t, err, "not attached", "the client says so itself")
	m, err := u.group.e.Alloc(blocks*blockBytes, engine.AllocOptions{})
	require.NoError(t, err)
	other, err := u.group.e.RegisterPrivate("other", m.Segment())
	require.NoError(t, err)
	require.NoError(t, u.Attach(t.Context(), other))
	u.mu.Lock()
	u.regions[u.region] = was // as a client that does not
	u.mu.Unlock()
	for _, move := range []func(context.Context, []cache.Key, Place) ([]cache.Outcome, error){
		u.Load, u.Store} {
		_, err = move(t.Context(), keysOf(1, 1), u.place(0, 1))
		require.ErrorIs(t, err, engine.ErrBounds)
		require.ErrorContains(t, err, "is none")
	}
	require.NoError(t, u.Client.Close(t.Context()))
}

// TestAttachGivenUp: a region whose attachment came too late counts for nothing.
func TestAttachGivenUp(t *testing.T) {
	_, s, path := openWhole(t)
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	require.NoError(t, u.Detach(t.Context(), u.region))
	standing := testpoint.Stand(t, "serve: imported")[0]
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- u.Attach(ctx, u.region) }()
	<-standing.Came
	over, end := context.WithCancel(t.Context())
	end()
	second := make(chan error, 1)
	go func() { second <- u.Attach(over, u.region) }()
	select { // it does not wait for the first one
	case err = <-second:
		require.ErrorIs(t, err, context.Canceled)
	case <-time.After(time.Minute):
		require.Fail(t, "it waits")
	}
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
	standing.GoOn()
	until(func() bool { // the server has the word
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, c := range s.clients {
			for _, r := range c.regions {
				if !r.revoked {
					return false
				}
			}
			return len(c.regions) > 0 && c.count == 0
		}
		return false
	})
	require.NoError(t, u.Attach(t.Context(), u.region))
	require.NoError(t, u.Client.Close(t.Context()))
}

// TestCloseBesideAttach: a region whose attachment is answered while its client closes has no lease
// afterwards.
func TestCloseBesideAttach(t *testing.T) {
	_, path := openServer(t)
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	require.NoError(t, u.Detach(t.Context(), u.region))
	standing := testpoint.Stand(t, "serve: attached")[0]
	attached, closed := make(chan error), make(chan error)
	go func() { attached <- u.Attach(t.Context(), u.region) }()
	<-standing.Came
	go func() { closed <- u.Client.Close(t.Context()) }()
	<-u.Lost()
	standing.GoOn()
	require.NoError(t, <-attached)
	require.NoError(t, <-closed)
	require.Zero(t, u.group.e.Stats().Leases)
}

// TestHints: hints and estimates pass a server.
func TestHints(t *testing.T) {
	ctx := t.Context()
	c, path := openServer(t)
	u, err := openUser(ctx, path)
	require.NoError(t, err)
	keys := keysOf(1, 4)
	u.fill(keys)
	_, err = u.Store(ctx, keys, u.place(0, 4))
	require.NoError(t, err)
	r, err := u.Hint(ctx, keysOf(1, 5), cache.Hint{Kind: cache.HintRetain, For: time.Hour})
	require.NoError(t, err)
	require.Equal(t, cache.HintResult{Applied: 4, Missing: 1}, r)
	r, err = u.Hint(ctx, keys, cache.Hint{Kind: cache.HintDemote})
	require.ErrorContains(t, err, "no disk")
	require.Equal(t, cache.HintResult{Refused: 4}, r)
	list, err := u.HintEnvelope(ctx, fmt.Appendf(nil, `{"protocol_version":"0.1","message_id":"m",`+
		`"actions":[{"action_id":"a","action_type":"kv.release","action_version":"1.0","payload":`+
		`{"block_hashes":["%s"]}}]}`, hex.EncodeToString(keys[0][:])))
	require.NoError(t, err)
	require.Equal(t, []cache.ActionOutcome{{ActionID: "a", Status: cache.ActionApplied,
		HintResult: cache.HintResult{Applied: 1}}}, list)
	require.EqualValues(t, 3*blockBytes, c.Stats().Held)
	_, err = u.HintEnvelope(ctx, []byte("garbage"))
	require.Error(t, err)
	outcomes, err := u.Prefetch(ctx, keysOf(4, 2))
	require.NoError(t, err)
	require.Equal(t, []cache.Outcome{cache.Done, cache.Missing}, outcomes)
	e, err := u.Estimate(ctx, keysOf(1, 5))
	require.NoError(t, err)
	require.Equal(t, [2]int{4, 0}, e.Blocks)
	require.Equal(t, 1, e.Missing)
	require.NoError(t, u.Client.Close(ctx))
}
