// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/cluster/placement"
	"github.com/sluicehq/sluice/kv/directory"
)

const (
	blockBytes = 8 << 10
	chainKeys  = 64 // of segments of 1, 1, 2, 4, 8, 16 and 32

	nodeVariable  = "SLUICE_TEST_NODE"  // folder and name of a node that a child process is
	pointVariable = "SLUICE_TEST_POINT" // where that stops itself, once
	stuck         = "stuck "            // before it: a goroutine alone stands there
)

func TestMain(m *testing.M) {
	if path, ok := os.LookupEnv(nodeVariable); ok {
		fmt.Fprintln(os.Stderr, serveForEver(path))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func openEngine(name string) (*engine.Engine, error) {
	b, err := shm.New(shm.Config{})
	if err != nil {
		return nil, err
	}
	return engine.Open(engine.Config{Name: name, Plaintext: true, Backends: []driver.Backend{b}})
}

// serveForEver is a node whose files begin with a path; the end of that is its name.
func serveForEver(path string) error {
	ctx := context.Background()
	e, err := openEngine(filepath.Base(path))
	if err != nil {
		return err
	}
	c, err := cache.Open(ctx, cache.Config{Engine: e, Memory: cache.MemoryConfig{
		Path: path + ".memory", Bytes: 2 * chainKeys * blockBytes, Extent: 8 * blockBytes},
		Blocks: 2 * chainKeys})
	if err != nil {
		return err
	}
	s, err := serve.New(serve.Config{Cache: c, Engine: e})
	if err != nil {
		return err
	}
	l, err := engine.Listen("unix", path+".sock")
	if err != nil {
		return err
	}
	if point := os.Getenv(pointVariable); point != "" {
		if at, is := strings.CutPrefix(point, stuck); is {
			testpoint.First(at, func() { select {} })
		} else {
			testpoint.First(point, testpoint.StopProcess)
		}
	}
	go func() { _ = e.Serve(ctx, l) }()
	fmt.Println("serves")
	return s.Run(ctx)
}

// child is a node in a process of its own.
type child struct {
	path string
	cmd  *exec.Cmd
}

func (c *child) start(t testing.TB, env ...string) {
	t.Helper()
	c.cmd = exec.Command(os.Args[0])
	c.cmd.Env = append(append(os.Environ(), nodeVariable+"="+c.path), env...)
	c.cmd.Stderr = os.Stderr
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := c.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.cmd.Start())
	require.True(t, bufio.NewScanner(out).Scan())
}

func (c *child) kill() {
	if c.cmd.ProcessState == nil {
		_ = c.cmd.Process.Kill()
		_ = c.cmd.Wait()
	}
}

// awaitStop returns once the process stands still by SIGSTOP.
func (c *child) awaitStop(t *testing.T) {
	var status unix.WaitStatus
	_, err := unix.Wait4(c.cmd.Process.Pid, &status, unix.WUNTRACED, nil)
	require.NoError(t, err)
	require.True(t, status.Stopped())
}

// startNodes starts nodes, and lists them.
func startNodes(t testing.TB, names ...string) (map[string]*child, []directory.Node) {
	t.Helper()
	folder, children, nodes := t.TempDir(), map[string]*child{}, []directory.Node{}
	for _, name := range names {
		c := &child{path: filepath.Join(folder, name)}
		children[name] = c
		nodes = append(nodes, directory.Node{Name: name, Weight: 1,
			Addresses: []string{"unix:" + c.path + ".sock"}})
		c.start(t)
		t.Cleanup(func() { c.kill() })
	}
	return children, nodes
}

// changing is a directory whose view a test sets.
type changing struct {
	mu      sync.Mutex
	view    *directory.View
	changed chan struct{}
}

func (d *changing) View() (*directory.View, <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.view, d.changed
}

func (d *changing) set(v *directory.View) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.view = v
	if d.changed != nil {
		close(d.changed)
	}
	d.changed = make(chan struct{})
}

// user is a process that serves a model, with memory for two chains.
type user struct {
	*Cluster
	*Space
	mem    []byte
	region *engine.Region
	keys   []cache.Key
}

func openUser(t testing.TB, d directory.Directory) *user {
	t.Helper()
	e, err := openEngine("user")
	require.NoError(t, err)
	m, err := e.Alloc(2*chainKeys*blockBytes, engine.AllocOptions{})
	require.NoError(t, err)
	u := &user{mem: m.Bytes()}
	u.region, err = e.RegisterPrivate("kv", m.Segment())
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	u.Cluster, err = Open(ctx, Config{Engine: e, Directory: d, Limit: time.Minute})
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, u.Cluster.Close(ctx))
		require.NoError(t, e.Close())
	})
	require.NoError(t, u.Attach(ctx, u.region))
	u.Space, err = u.Namespace(ctx, "model", [32]byte{1})
	require.NoError(t, err)
	u.keys = u.spread(t)
	return u
}

// spread returns a chain of which each node has a segment.
func (u *user) spread(t testing.TB) []cache.Key {
	l := u.layout.Load()
	for seed := range uint64(10000) {
		keys, has := chainOf(seed), map[int]bool{}
		owners, copies := u.owners(l, keys)
		for k := range keys {
			has[owners[k*copies]] = true
		}
		if len(has) == len(l.nodes) {
			return keys
		}
	}
	require.Fail(t, "there is no such chain")
	return nil
}

func chainOf(seed uint64) []cache.Key {
	keys := make([]cache.Key, chainKeys)
	for k := range keys {
		binary.BigEndian.PutUint64(keys[k][:], seed)
		binary.BigEndian.PutUint64(keys[k][8:], uint64(k))
	}
	return keys
}

func all(int) bool { return true }

// ownerOf names the first node of a block of the chain.
func (u *user) ownerOf(k int) string {
	l := u.layout.Load()
	owners, copies := u.owners(l, u.keys)
	return l.nodes[owners[k*copies]].name
}

func place(u *user, from, n int) serve.Place {
	p := serve.Place{Region: u.region, Stride: blockBytes, Run: blockBytes}
	for k := range n {
		p.Slots = append(p.Slots, uint32(from+k))
	}
	return p
}

func content(key cache.Key) []byte { return bytes.Repeat(key[:], blockBytes/len(key)) }

func (u *user) block(slot int) []byte { return u.mem[slot*blockBytes:][:blockBytes] }

// store stores the chain, and wants each block Done.
func (u *user) store(t *testing.T) {
	t.Helper()
	for k, key := range u.keys {
		copy(u.block(k), content(key))
	}
	outcomes, err := u.Store(t.Context(), u.keys, place(u, 0, len(u.keys)))
	require.NoError(t, err)
	for _, o := range outcomes {
		require.Equal(t, cache.Done, o)
	}
}

// load loads the chain, and checks every byte of it. It wants the blocks that has reports, and no
// others.
func (u *user) load(t *testing.T, has func(k int) bool) {
	t.Helper()
	clear(u.mem)
	found, err := u.Match(t.Context(), u.keys)
	require.NoError(t, err)
	outcomes, err := u.Load(t.Context(), u.keys, place(u, chainKeys, len(u.keys)))
	require.NoError(t, err)
	for k, o := range outcomes {
		require.Equal(t, has(k), found.Blocks[k].There(), "block %d", k)
		if has(k) {
			require.Equal(t, cache.Done, o, "block %d", k)
			require.Equal(t, content(u.keys[k]), u.block(chainKeys+k))
		} else {
			require.Equal(t, cache.Missing, o, "block %d", k)
		}
	}
}

// await waits until a node is in a state.
func (u *user) await(t *testing.T, name string, state State) {
	t.Helper()
	limit := time.Now().Add(2 * time.Minute)
	for {
		s := u.Stats()
		for _, n := range s.Nodes {
			if n.Name == name && n.State == state {
				return
			}
		}
		require.True(t, time.Now().Before(limit), "%s is not %s: %+v", name, state, s)
		<-time.After(time.Millisecond)
	}
}

// TestKilledNode: what a node has that is killed is a miss, and all else a hit; once it is there
// again so is what it had.
func TestKilledNode(t *testing.T) {
	children, nodes := startNodes(t, "a", "b", "c")
	d, err := directory.List(nodes, nil)
	require.NoError(t, err)
	u := openUser(t, d)
	u.store(t)
	u.load(t, all)

	children["b"].kill()
	u.await(t, "b", Unreachable)
	u.load(t, func(k int) bool { return u.ownerOf(k) != "b" })
	outcomes, err := u.Store(t.Context(), u.keys, place(u, 0, chainKeys))
	require.NoError(t, err, "a node that is not there is no error")
	for k, o := range outcomes {
		if u.ownerOf(k) == "b" {
			require.Equal(t, cache.Failed, o)
		} else {
			require.Equal(t, cache.Known, o)
		}
	}
	require.ErrorContains(t, u.Remove(t.Context(), u.keys[:1]), "node b may still have")

	children["b"].start(t)
	u.await(t, "b", Serving)
	u.load(t, func(k int) bool { return k > 0 || u.ownerOf(0) == "b" }) // block 0 was removed
}

// TestCopies: with two copies of each block nothing is missed while one node is gone.
func TestCopies(t *testing.T) {
	children, nodes := startNodes(t, "a", "b", "c")
	d, err := directory.List(nodes, map[string]directory.Namespace{"model": {Copies: 2}})
	require.NoError(t, err)
	u := openUser(t, d)
	u.store(t)
	u.load(t, all)
	for name, c := range children {
		c.kill()
		u.await(t, name, Unreachable)
		u.load(t, all)
		c.start(t)
		u.await(t, name, Serving)
	}
	require.NoError(t, u.Remove(t.Context(), u.keys))
	u.load(t, func(int) bool { return false })
}

// TestStoppedNode stops a node in the middle of a Load by SIGSTOP. The Load ends all the same, and
// what comes of the node when it goes on does not reach the memory any more.
func TestStoppedNode(t *testing.T) {
	children, nodes := startNodes(t, "a", "b")
	d, err := directory.List(nodes, nil)
	require.NoError(t, err)
	u := openUser(t, d)
	u.store(t)
	b := children["b"]
	b.kill()
	b.start(t, pointVariable+"=cache: pinned")
	u.await(t, "b", Serving)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	type answer struct {
		outcomes []cache.Outcome
		err      error
	}
	ended := make(chan answer)
	go func() {
		outcomes, err := u.Load(ctx, u.keys, place(u, chainKeys, chainKeys))
		ended <- answer{outcomes, err}
	}()
	b.awaitStop(t)
	soon, free := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer free()
	outcomes, err := u.Load(soon, u.keys, place(u, 0, chainKeys))
	require.NoError(t, err)
	for k, o := range outcomes {
		if u.ownerOf(k) == "b" {
			require.Equal(t, cache.Late, o)
		}
	}
	cancel()
	a := <-ended
	require.NoError(t, a.err)
	for k, o := range a.outcomes {
		if u.ownerOf(k) == "b" {
			require.Equal(t, cache.Late, o)
		}
	}
	mine := bytes.Repeat([]byte{0xaa}, len(u.mem))
	copy(u.mem, mine)
	require.NoError(t, b.cmd.Process.Signal(unix.SIGCONT))
	u.await(t, "b", Serving)
	for {
		r, err := u.Report(t.Context(), "b")
		require.NoError(t, err)
		if r.Running == 1 { // this one
			break
		}
	}
	require.Equal(t, mine, u.mem)
	u.load(t, all)
}

// TestDeadlines: loads with hardly any time, on one region at once. What is Done has its bytes;
// nothing comes into the slots of the others once a load has returned; none is an error.
func TestDeadlines(t *testing.T) {
	_, nodes := startNodes(t, "a", "b")
	d, err := directory.List(nodes, map[string]directory.Namespace{"model": {Copies: 2}})
	require.NoError(t, err)
	u := openUser(t, d)
	u.store(t)
	const users, each = 4, 2 * chainKeys / 4
	var loads sync.WaitGroup
	failed := make(chan error, users)
	for i := range users {
		loads.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(i)))
			mine := bytes.Repeat([]byte{0xaa}, blockBytes)
			keys := u.keys[:each]
			outcomes := make([]cache.Outcome, each)
			for range 100 {
				for k, o := range outcomes {
					slot := u.block(i*each + k)
					if o != cache.Done && o != cache.Undone && !bytes.Equal(slot, mine) {
						failed <- fmt.Errorf("block %d was %v and is written to", k, o)
						return
					}
				}
				ctx, cancel := context.WithTimeout(t.Context(),
					time.Duration(random.IntN(1<<random.IntN(17)))*time.Microsecond)
				var err error
				outcomes, err = u.Load(ctx, keys, place(u, i*each, each))
				cancel()
				if err != nil {
					failed <- err
					return
				}
				for k, o := range outcomes {
					slot := u.block(i*each + k)
					if o != cache.Done {
						copy(slot, mine)
					} else if !bytes.Equal(slot, content(keys[k])) {
						failed <- fmt.Errorf("block %d is Done and has other bytes", k)
						return
					}
				}
			}
		})
	}
	loads.Wait()
	close(failed)
	require.NoError(t, <-failed)
	u.await(t, "a", Serving)
	u.await(t, "b", Serving)
	for k, key := range u.keys {
		copy(u.block(k), content(key))
	}
	u.load(t, all)
}

// TestSilentNode: one that has not answered in time is a miss, also for calls without a limit,
// until it answers.
func TestSilentNode(t *testing.T) {
	children, nodes := startNodes(t, "a", "b")
	d, err := directory.List(nodes, nil)
	require.NoError(t, err)
	u := openUser(t, d)
	u.store(t)
	b := children["b"]
	closed, err := u.Namespace(t.Context(), "closed", [32]byte{})
	require.NoError(t, err)
	require.NoError(t, b.cmd.Process.Signal(unix.SIGSTOP))
	b.awaitStop(t)
	require.Eventually(t, func() bool {
		soon, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		_, err := u.Match(soon, u.keys)
		require.NoError(t, err)
		return u.Stats().Nodes[1].State == Silent
	}, time.Minute, time.Millisecond)
	require.Eventually(t, func() bool { // a may have been late as well
		u.await(t, "a", Serving)
		found, err := u.Match(t.Context(), u.keys)
		require.NoError(t, err)
		for k, f := range found.Blocks {
			if f.There() != (u.ownerOf(k) == "a") {
				return false
			}
		}
		return true
	}, time.Minute, time.Millisecond)
	require.NoError(t, u.Detach(t.Context(), u.region))
	_, err = u.Load(t.Context(), u.keys, place(u, chainKeys, chainKeys))
	require.ErrorIs(t, err, engine.ErrBounds)
	require.NoError(t, u.Attach(t.Context(), u.region))
	require.NoError(t, closed.Close())
	require.NoError(t, b.cmd.Process.Signal(unix.SIGCONT))
	u.await(t, "b", Serving)
	u.load(t, all)
	at := u.nodes["b"].usable()
	require.NotNil(t, at)
	require.Eventually(t, func() bool { // what was closed meanwhile it has no more
		at.mu.Lock()
		defer at.mu.Unlock()
		return len(at.spaces) == 1
	}, time.Minute, time.Millisecond)
}

// TestOtherProcess: where the directory has another process of a name, that one is the node, and
// not the one that had the name: it answers still, or stands still for ever.
func TestOtherProcess(t *testing.T) {
	for _, stands := range []bool{false, true} {
		t.Run(fmt.Sprint(stands), func(t *testing.T) {
			first, nodes := startNodes(t, "a")
			second, others := startNodes(t, "a")
			nodes[0].Generation, others[0].Generation = 1, 2
			view := func(nodes []directory.Node) *directory.View {
				v, err := directory.NewView(nodes, nil)
				require.NoError(t, err)
				return v
			}
			d := &changing{}
			d.set(view(nodes))
			u := openUser(t, d)
			u.store(t)
			if stands {
				require.NoError(t, first["a"].cmd.Process.Signal(unix.SIGSTOP))
				first["a"].awaitStop(t)
			}
			d.set(view(others))
			require.Eventually(t, func() bool {
				soon, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				r, err := u.Report(soon, "a")
				return err == nil && r.PID == second["a"].cmd.Process.Pid
			}, time.Minute, time.Millisecond)
			u.store(t)
			u.load(t, all)
		})
	}
}

// Kinds and codes of a server's messages.
const (
	sentSpace, sentMatch, sentLoad, sentPrefetch = 2, 6, 7, 9
	sentEnvelope, sentEstimate                   = 12, 13
	sentAnswer, sentPin, sentUnpin               = 15, 18, 19
	codeBusy, codeDenied                         = 4, 10
)

// startLiar starts a node that answers what a test wants, but for namespaces: a code and a body, or
// nothing.
func startLiar(t *testing.T, name string, reply func(what byte, keys int) (code byte, body []byte,
	answers bool)) directory.Node {
	t.Helper()
	path := filepath.Join(t.TempDir(), "liar.sock")
	e, err := openEngine(name)
	require.NoError(t, err)
	l, err := engine.Listen("unix", path)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var parts sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		parts.Wait()
		require.NoError(t, e.Close())
	})
	parts.Go(func() { _ = e.Serve(ctx, l) })
	parts.Go(func() {
		for {
			n, err := e.Next(ctx)
			if err != nil {
				return
			}
			if n.Err != nil {
				continue
			}
			keys, code, body, answers := 0, byte(0), []byte("1"), true
			if len(n.Data) >= 15 { // else it wants no answer
				keys = int(binary.LittleEndian.Uint32(n.Data[11:]))
			}
			if what := n.Data[0]; what != sentSpace {
				code, body, answers = reply(what, keys)
			}
			if answers && len(n.Data) >= 15 {
				answer := append(append([]byte{sentAnswer}, n.Data[1:9]...), code, 0, 0)
				_ = n.Peer.Notify(ctx, append(answer, body...))
			}
		}
	})
	return directory.Node{Name: name, Weight: 1, Addresses: []string{"unix:" + path}}
}

// TestBusyNode: a node that was late, and refuses the first question whether it answers, is asked
// again.
func TestBusyNode(t *testing.T) {
	late := 0
	node := startLiar(t, "busy", func(what byte, keys int) (code byte, body []byte, answers bool) {
		switch {
		case what == sentMatch && late == 0:
			late++
			return 0, nil, false
		case what == sentMatch:
			return 0, make([]byte, keys), true
		case late == 1:
			late++
			return codeBusy, nil, true
		}
		return 0, nil, true
	})
	d, err := directory.List([]directory.Node{node}, nil)
	require.NoError(t, err)
	u := openUser(t, d)
	require.Eventually(t, func() bool { // a call may end before it has asked the node
		soon, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		_, err := u.Match(soon, u.keys)
		require.NoError(t, err)
		return u.Stats().Nodes[0].Late == 1
	}, time.Minute, time.Millisecond)
	u.await(t, "busy", Serving)
	before := u.Stats().Nodes[0].Requests
	_, err = u.Match(t.Context(), u.keys)
	require.NoError(t, err)
	require.Equal(t, before+1, u.Stats().Nodes[0].Requests)
}

// TestLongToken: what no process would read as a token is none, and keeps nothing pinned.
func TestLongToken(t *testing.T) {
	var pins atomic.Int64
	var nodes []directory.Node
	for _, end := range []string{"a", "b"} {
		name := strings.Repeat("<", 200) + end // which JSON has in six bytes each
		nodes = append(nodes, startLiar(t, name, func(what byte, keys int) (code byte, body []byte,
			answers bool) {
			switch what {
			case sentMatch:
				body = bytes.Repeat([]byte{byte(cache.InMemory)}, keys)
			case sentPin:
				pins.Add(1)
				body = append(make([]byte, 2), bytes.Repeat([]byte{byte(cache.Done)}, keys)...)
			case sentUnpin:
				pins.Add(-1)
			}
			return 0, body, true
		}))
	}
	d, err := directory.List(nodes, nil)
	require.NoError(t, err)
	u := openUser(t, d)
	chains := slices.Repeat([][]cache.Key{u.keys}, chainsMax)
	_, err = u.MatchPinned(t.Context(), time.Hour, chains...)
	require.ErrorIs(t, err, engine.ErrBounds)
	require.Eventually(t, func() bool { return pins.Load() == 0 }, time.Minute, time.Millisecond)
	token, err := u.MatchPinned(t.Context(), time.Hour, chains[:2]...)
	require.NoError(t, err)
	require.Equal(t, chainKeys, token.Prefix)
	_, err = ParseToken(token.Bytes())
	require.NoError(t, err)
}

// TestCloseBesideStopped: the cluster is closed, and its memory is the caller's, while a node
// stands still in the middle of a Store.
func TestCloseBesideStopped(t *testing.T) {
	children, nodes := startNodes(t, "a", "b")
	d, err := directory.List(nodes, nil)
	require.NoError(t, err)
	children["b"].kill()
	children["b"].start(t, pointVariable+"=cache: landed")
	u := openUser(t, d)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	storing, end := context.WithCancel(ctx)
	ended := make(chan error)
	go func() {
		_, err := u.Store(storing, u.keys, place(u, 0, chainKeys))
		ended <- err
	}()
	children["b"].awaitStop(t)
	end()
	require.NoError(t, <-ended)
	require.NoError(t, u.Cluster.Close(ctx))
	require.NoError(t, u.region.Close(), "nobody has a lease of it")
}

// TestBehind: blocks that are stored behind others are where a call about all of them looks.
func TestBehind(t *testing.T) {
	_, nodes := startNodes(t, "a", "b", "c")
	d, err := directory.List(nodes, nil)
	require.NoError(t, err)
	u := openUser(t, d)
	for k, key := range u.keys {
		copy(u.block(k), content(key))
	}
	at, step := 0, 1
	s := u.Space
	for ; at < chainKeys; step++ {
		end := min(at+step, chainKeys)
		p := place(u, at, end-at)
		outcomes, err := s.Store(t.Context(), u.keys[at:end], p)
		require.NoError(t, err)
		for _, o := range outcomes {
			require.Equal(t, cache.Done, o)
		}
		s = s.Behind(u.keys[at:end])
		at = end
	}
	u.load(t, all)
	require.Equal(t, u.Space, u.Behind(nil))
	found, err := u.Behind(u.keys[:20]).Match(t.Context(), u.keys[20:])
	require.NoError(t, err)
	require.Equal(t, chainKeys-20, found.Prefix)
}

// TestNamespaces: those that are closed make room at the nodes for others.
func TestNamespaces(t *testing.T) {
	_, nodes := startNodes(t, "a", "b")
	d, err := directory.List(nodes, nil)
	require.NoError(t, err)
	u := openUser(t, d)
	var open []*Space
	for k := 1; ; k++ { // one is open already
		s, err := u.Namespace(t.Context(), fmt.Sprint("n", k), [32]byte{})
		if err != nil {
			require.ErrorIs(t, err, engine.ErrBusy)
			require.Equal(t, 64, k)
			break
		}
		open = append(open, s)
	}
	again, err := u.Namespace(t.Context(), "n1", [32]byte{})
	require.NoError(t, err)
	for _, s := range open {
		require.NoError(t, s.Close())
		require.NoError(t, s.Behind(u.keys).Close(), "it was closed")
	}
	require.Equal(t, map[spaceName]int{u.name: 1, again.name: 1}, u.opens)
	found, err := again.Match(t.Context(), u.keys)
	require.NoError(t, err)
	require.Zero(t, found.Prefix)
	for _, n := range u.Stats().Nodes {
		require.Zero(t, n.Failed)
	}
	_, err = u.Namespace(t.Context(), "n64", [32]byte{})
	require.NoError(t, err)
}

// TestViews: nodes come and go as the directory says, and so do their blocks.
func TestViews(t *testing.T) {
	_, nodes := startNodes(t, "a", "b", "c")
	d := &changing{}
	view := func(nodes []directory.Node) {
		v, err := directory.NewView(nodes, nil)
		require.NoError(t, err)
		d.set(v)
	}
	view(nodes)
	u := openUser(t, d)
	keys := u.keys
	u.store(t)
	want := map[string]int{}
	for k := range keys {
		want[u.ownerOf(k)]++
	}
	c := u.nodes["c"].usable()
	require.NotNil(t, c)
	view(nodes[:2])
	require.Eventually(t, func() bool { return len(u.Stats().Nodes) == 2 }, time.Minute,
		time.Millisecond)
	<-c.Lost()
	require.True(t, c.hasRevoked(c.revoked.Load()), "what it has refused meanwhile is a miss")
	found, err := u.Match(t.Context(), keys)
	require.NoError(t, err)
	there := 0
	for _, f := range found.Blocks {
		if f.There() {
			there++
		}
	}
	require.Equal(t, want["a"]+want["b"], there, "only what was at c is elsewhere now")
	view(nodes)
	u.await(t, "c", Serving)
	u.load(t, all)

	nodes[2].Weight = 0 // it drains
	view(nodes)
	require.Eventually(t, func() bool { return u.Stats().Nodes[2].Weight == 0 }, time.Minute,
		time.Millisecond)
	u.load(t, func(k int) bool {
		owners := placement.Owners(nil, u.layout.Load().bids, keys[0], 3)
		require.Len(t, owners, 2)
		found, err := u.Match(t.Context(), keys)
		require.NoError(t, err)
		return found.Blocks[k].There()
	})
	view(nil)
	require.Eventually(t, func() bool { return len(u.Stats().Nodes) == 0 }, time.Minute,
		time.Millisecond)
	u.load(t, func(int) bool { return false })
}

// TestToken: what one process has matched another loads as a whole, though all else would have had
// to go; and once a node is lost it does not.
func TestToken(t *testing.T) {
	children, nodes := startNodes(t, "a", "b", "c")
	d, err := directory.List(nodes, nil)
	require.NoError(t, err)
	u, other := openUser(t, d), openUser(t, d)
	u.store(t)
	held := func() (n uint64) {
		for _, node := range nodes {
			r, err := u.Report(t.Context(), node.Name)
			require.NoError(t, err)
			n += r.Held
		}
		return n
	}
	const pinned = 8 // within what a namespace may pin on one node: an eighth of its memory
	half := u.keys[:pinned]
	token, err := u.MatchPinned(t.Context(), time.Hour, half, half[:pinned/2])
	require.NoError(t, err)
	require.Equal(t, pinned/2, token.Prefix, "of the shorter chain")
	require.NoError(t, token.Close())
	require.Eventually(t, func() bool { return held() == 0 }, time.Minute, time.Millisecond)

	token, err = u.MatchPinned(t.Context(), time.Hour, half, half)
	require.NoError(t, err)
	require.Equal(t, pinned, token.Prefix)
	require.EqualValues(t, 2*pinned*blockBytes, held())
	for seed := uint64(1 << 40); seed < 1<<40+8; seed++ { // more than all nodes have room for
		keys := chainOf(seed)
		_, err := other.Store(t.Context(), keys, place(other, 0, chainKeys))
		require.NoError(t, err)
	}
	read, err := ParseToken(token.Bytes())
	require.NoError(t, err)
	for chain := range 2 {
		clear(other.mem)
		err := other.LoadPinned(t.Context(), read, chain, half, place(other, 0, pinned))
		require.NoError(t, err)
		for k, key := range half {
			require.Equal(t, content(key), other.block(k))
		}
	}
	for _, bad := range []string{"", "{}", `{"prefix":1,"chains":[[]]}`,
		`{"prefix":-1,"chains":[[]]}`, `{"prefix":1,"chains":[[{"node":"a","blocks":2}]]}`} {
		_, err := ParseToken([]byte(bad))
		require.ErrorIs(t, err, engine.ErrCorrupt, bad)
	}
	err = other.LoadPinned(t.Context(), read, 2, half, place(other, 0, pinned))
	require.ErrorIs(t, err, engine.ErrBounds)
	lost := u.ownerOf(0)
	children[lost].kill()
	err = other.LoadPinned(t.Context(), read, 0, half, place(other, 0, pinned))
	require.ErrorIs(t, err, ErrTokenLost)
	require.NotErrorIs(t, err, engine.ErrUnproven)
	_ = token.Close() // at the node that is gone there is none
}

// TestRefused: what no node is asked for, and a node that is another one than the directory says.
func TestRefused(t *testing.T) {
	_, nodes := startNodes(t, "a")
	nodes = append(nodes, directory.Node{Name: "z", Weight: 1, Addresses: nodes[0].Addresses})
	d, err := directory.List(nodes, nil)
	require.NoError(t, err)
	u := openUser(t, d)
	require.Contains(t, u.Stats().Nodes[1].Why, `has the name "a"`)
	p := place(u, 0, 2)
	p.Slots[1] = p.Slots[0]
	_, err = u.Load(t.Context(), u.keys[:2], p)
	require.ErrorIs(t, err, engine.ErrBounds)
	_, err = u.Load(t.Context(), u.keys[:1], p)
	require.ErrorIs(t, err, engine.ErrBounds)
	_, err = u.Match(t.Context(), make([]cache.Key, keysMax+1))
	require.ErrorIs(t, err, engine.ErrBounds)
	_, err = u.Namespace(t.Context(), "", [32]byte{})
	require.ErrorIs(t, err, engine.ErrBounds)
	_, err = u.MatchPinned(t.Context(), time.Millisecond, u.keys)
	require.ErrorIs(t, err, engine.ErrBounds)
	p = place(u, 0, 1)
	p.Run, p.Stride = 1<<30, 1<<30 // longer than an extent of the node
	var own []cache.Key
	for k := range u.keys {
		if own = u.keys[k : k+1]; u.ownerOfOne(own) == "a" {
			break
		}
	}
	_, err = u.Store(t.Context(), own, p)
	require.ErrorIs(t, err, engine.ErrBounds, "what is wrong for all nodes is an error")
	_, err = Open(t.Context(), Config{})
	require.ErrorIs(t, err, engine.ErrBounds)
	reg := u.regions[u.region]
	reg.over = true // as after a Detach without the proof
	require.ErrorIs(t, u.Attach(t.Context(), u.region), engine.ErrBusy)
	require.NoError(t, u.Detach(t.Context(), u.region))
	require.NoError(t, u.Attach(t.Context(), u.region))
}

func (u *user) ownerOfOne(keys []cache.Key) string {
	l := u.layout.Load()
	owners, _ := u.owners(l, keys)
	return l.nodes[owners[0]].name
}
