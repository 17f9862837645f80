// SPDX-License-Identifier: Apache-2.0

package member

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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
	"github.com/sluicehq/sluice/kv/cluster"
	"github.com/sluicehq/sluice/kv/cluster/placement"
	"github.com/sluicehq/sluice/kv/directory"
)

const (
	blockBytes = 4 << 10
	chainKeys  = 64 // of segments of 1, 1, 2, 4, 8, 16 and 32
	cacheKeys  = 16 * chainKeys

	nodeVariable  = "SLUICE_TEST_NODE"  // folder and name of a node that a child process is
	pointVariable = "SLUICE_TEST_POINT" // where that stops itself, once
)

func TestMain(m *testing.M) {
	if path, ok := os.LookupEnv(nodeVariable); ok {
		fmt.Fprintln(os.Stderr, serveForEver(path))
		os.Exit(1)
	}
	os.Exit(m.Run())
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

// set has the nodes be those of a folder: "a", or "a=0" for one of weight 0.
func (d *changing) set(folder string, copies int, names ...string) {
	var nodes []directory.Node
	for _, name := range names {
		n := directory.Node{Name: name[:1], Weight: 1,
			Addresses: []string{"unix:" + filepath.Join(folder, name[:1]) + ".sock"}}
		if len(name) > 1 {
			n.Weight = 0
		}
		nodes = append(nodes, n)
	}
	v, err := directory.NewView(nodes, map[string]directory.Namespace{"model": {Copies: copies}})
	if err != nil {
		panic(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.view = v
	if d.changed != nil {
		close(d.changed)
	}
	d.changed = make(chan struct{})
}

func openEngine(name string) (*engine.Engine, error) {
	b, err := shm.New(shm.Config{})
	if err != nil {
		return nil, err
	}
	return engine.Open(engine.Config{Name: name, Plaintext: true, Schedule: &engine.Schedule{},
		Backends: []driver.Backend{b}})
}

// node is a node in this process.
type node struct {
	*Member
	cache  *cache.Cache
	server *serve.Server
	mine   *engine.Engine // by which it is a client
	stop   func() error
}

// openNode starts a node whose files begin with a path; the end of that is its name.
func openNode(path string, d directory.Directory) (n *node, err error) {
	n = &node{}
	name := filepath.Base(path)
	e, err := openEngine(name)
	if err != nil {
		return nil, err
	}
	mine, err := openEngine(name + ".copies")
	if err != nil {
		return nil, err
	}
	n.mine = mine
	n.cache, err = cache.Open(context.Background(), cache.Config{Engine: e,
		Memory: cache.MemoryConfig{Path: path + ".memory", Bytes: cacheKeys * blockBytes,
			Extent: 8 * blockBytes}, Blocks: cacheKeys})
	if err != nil {
		return nil, err
	}
	n.Member, err = New(Config{Name: name, Cache: n.cache, BytesASecond: 1 << 40, Tick: time.Hour})
	if err != nil {
		return nil, err
	}
	n.server, err = serve.New(serve.Config{Cache: n.cache, Engine: e, Member: n.Member})
	if err != nil {
		return nil, err
	}
	l, err := engine.Listen("unix", path+".sock")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	joined, leave := context.WithCancel(ctx)
	served, ran, left := make(chan error, 1), make(chan error, 1), make(chan error, 1)
	go func() { served <- e.Serve(ctx, l) }()
	go func() { ran <- n.server.Run(ctx) }()
	go func() { left <- n.Run(joined, Net{Engine: mine, Directory: d}) }()
	n.stop = func() error {
		leave()
		err := <-left
		cancel()
		<-served
		for _, f := range []func() error{func() error { return <-ran }, n.cache.Close, e.Close,
			mine.Close} {
			if failed := f(); err == nil {
				err = failed
			}
		}
		return err
	}
	return n, nil
}

func startNode(t testing.TB, folder, name string, d directory.Directory) *node {
	t.Helper()
	n, err := openNode(filepath.Join(folder, name), d)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, n.stop()) })
	return n
}

// serveForEver is a node in a process of its own. It knows of no other node until it reads a line,
// which names them.
func serveForEver(path string) error {
	d := &changing{}
	d.set(filepath.Dir(path), 1, filepath.Base(path))
	if _, err := openNode(path, d); err != nil {
		return err
	}
	if point := os.Getenv(pointVariable); point != "" {
		testpoint.First(point, testpoint.StopProcess)
	}
	fmt.Println("serves")
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		var names []string
		for _, c := range in.Text() {
			names = append(names, string(c))
		}
		d.set(filepath.Dir(path), 1, names...)
	}
	return in.Err()
}

// child is a node in a process of its own.
type child struct {
	cmd *exec.Cmd
	in  *bufio.Writer
}

func startChild(t *testing.T, folder, name string, env ...string) *child {
	t.Helper()
	c := &child{cmd: exec.Command(os.Args[0])}
	c.cmd.Env = append(append(os.Environ(), nodeVariable+"="+filepath.Join(folder, name)), env...)
	c.cmd.Stderr = os.Stderr
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := c.cmd.StdoutPipe()
	require.NoError(t, err)
	in, err := c.cmd.StdinPipe()
	require.NoError(t, err)
	c.in = bufio.NewWriter(in)
	require.NoError(t, c.cmd.Start())
	require.True(t, bufio.NewScanner(out).Scan())
	t.Cleanup(c.kill)
	return c
}

func (c *child) kill() {
	if c.cmd.ProcessState == nil {
		_ = c.cmd.Process.Kill()
		_ = c.cmd.Wait()
	}
}

func (c *child) tell(t *testing.T, line string) {
	_, err := c.in.WriteString(line + "\n")
	require.NoError(t, err)
	require.NoError(t, c.in.Flush())
}

// user is a client, which asks each node for what placement gives it.
type user struct {
	*cluster.Cluster
	*cluster.Space
	mem    []byte
	region *engine.Region
}

func openUser(t testing.TB, d directory.Directory) *user {
	t.Helper()
	e, err := openEngine("user")
	require.NoError(t, err)
	memory, err := e.Alloc(chainKeys*blockBytes, engine.AllocOptions{})
	require.NoError(t, err)
	u := &user{mem: memory.Bytes()}
	u.region, err = e.RegisterPrivate("kv", memory.Segment())
	require.NoError(t, err)
	u.Cluster, err = cluster.Open(t.Context(), cluster.Config{Engine: e, Directory: d,
		Limit: time.Minute})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, u.Cluster.Close(context.Background()))
		require.NoError(t, e.Close())
	})
	require.NoError(t, u.Attach(t.Context(), u.region))
	u.Space, err = u.Namespace(t.Context(), "model", [32]byte{1})
	require.NoError(t, err)
	return u
}

func chainOf(seed uint64) []cache.Key {
	keys := make([]cache.Key, chainKeys)
	for k := range keys {
		binary.BigEndian.PutUint64(keys[k][:], seed)
		binary.BigEndian.PutUint64(keys[k][8:], uint64(k))
	}
	return keys
}

func content(key cache.Key) []byte { return bytes.Repeat(key[:], blockBytes/len(key)) }

// segmentsOf visits the segments of a chain, with their owners by name.
func segmentsOf(d directory.Directory, chain []cache.Key, owners int,
	visit func(first int, keys []cache.Key, owners []string)) {
	v, _ := d.View()
	var nodes []placement.Node
	for _, n := range v.Nodes {
		nodes = append(nodes, placement.Node{ID: cluster.NodeID(n.Name), Weight: n.Weight})
	}
	for number, first := 0, 0; first < len(chain); number++ {
		end := min(placement.FirstOf(number+1), len(chain))
		var names []string
		for _, o := range placement.Owners(nil, nodes, chain[first], owners) {
			names = append(names, v.Nodes[o].Name)
		}
		visit(first, chain[first:end], names)
		first = end
	}
}

func (u *user) place(first int, keys []cache.Key) serve.Place {
	p := serve.Place{Region: u.region, Stride: blockBytes, Run: blockBytes,
		Segments: []serve.Segment{{Head: keys[0], First: uint32(first), Blocks: uint32(len(keys))}}}
	for k := range keys {
		p.Slots = append(p.Slots, uint32(k))
	}
	return p
}

func (u *user) storeAt(t *testing.T, node string, first int, keys []cache.Key) {
	t.Helper()
	for k, key := range keys {
		copy(u.mem[k*blockBytes:], content(key))
	}
	outcomes, err := u.StoreAt(t.Context(), node, keys, u.place(first, keys))
	require.NoError(t, err)
	require.NotContains(t, outcomes, cache.Failed)
}

// loadFrom wants all blocks Done, and checks every byte of them.
func (u *user) loadFrom(t *testing.T, node string, first int, keys []cache.Key) {
	t.Helper()
	clear(u.mem)
	outcomes, err := u.LoadFrom(t.Context(), node, keys, u.place(first, keys))
	require.NoError(t, err)
	for k, o := range outcomes {
		require.Equal(t, cache.Done, o)
		require.Equal(t, content(keys[k]), u.mem[k*blockBytes:][:blockBytes])
	}
}

// store stores chains at as many owners.
func (u *user) store(t *testing.T, d directory.Directory, chains, copies int) {
	t.Helper()
	for seed := range uint64(chains) {
		segmentsOf(d, chainOf(seed), copies, func(first int, keys []cache.Key, owners []string) {
			for _, o := range owners {
				u.storeAt(t, o, first, keys)
			}
		})
	}
}

// has reports whether a node has all of some blocks.
func (u *user) has(t *testing.T, node string, keys []cache.Key) bool {
	m, err := u.MatchAt(t.Context(), node, keys)
	return err == nil && m.Prefix == len(keys)
}

// complete waits until each segment is at all of its owners, and checks the bytes there.
func (u *user) complete(t *testing.T, d directory.Directory, chains, copies int) {
	t.Helper()
	for seed := range uint64(chains) {
		segmentsOf(d, chainOf(seed), copies, func(first int, keys []cache.Key, owners []string) {
			for _, o := range owners {
				eventually(t, func() bool { return u.has(t, o, keys) })
				u.loadFrom(t, o, first, keys)
			}
		})
	}
}

func eventually(t *testing.T, is func() bool) {
	t.Helper()
	require.Eventually(t, is, 2*time.Minute, time.Millisecond)
}

// known waits until a node has counted what clients have stored there.
func known(t *testing.T, nodes ...*node) {
	t.Helper()
	for _, n := range nodes {
		eventually(t, func() bool {
			blocks := 0
			n.ask(t.Context(), func() { blocks = n.blocks })
			return blocks == n.cache.Stats().Tiers[cache.Memory].Blocks
		})
	}
}

func (n *node) tickNow(t *testing.T) { n.ask(t.Context(), n.tick) }

// idle wants that nothing of a move is left.
func idleNode(t *testing.T, n *node) {
	t.Helper()
	eventually(t, func() bool {
		r := n.server.Report()
		return r.Running == 0 && r.Copies.Pending == 0
	})
	s := n.cache.Stats()
	require.Zero(t, s.Held)
	require.Zero(t, s.Unproven)
	spaces, blocks := n.cache.Spaces(), int64(0)
	for _, space := range spaces {
		blocks += space.Blocks[cache.Memory]
	}
	require.EqualValues(t, blocks, s.Tiers[cache.Memory].Blocks, "slots of blocks alone")
}

// follow takes the digests of a node into a view, until the view says so.
func follow(t *testing.T, n *node, v *placement.View, since []byte, until func() bool) []byte {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for !until() {
		text, next, err := n.Digest(ctx, since)
		require.NoError(t, err)
		d, err := placement.DecodeDigest(text)
		require.NoError(t, err)
		require.NoError(t, v.Apply(d))
		since = next
	}
	return since
}

// TestHotSegment: a segment that is read much gets further owners, which have it when they are
// announced, and what comes to it later; once nobody reads it any more the copies are surplus.
func TestHotSegment(t *testing.T) {
	folder, d := t.TempDir(), &changing{}
	d.set(folder, 1, "a", "b", "c")
	nodes := map[string]*node{}
	for _, name := range []string{"a", "b", "c"} {
		nodes[name] = startNode(t, folder, name, d)
	}
	u := openUser(t, d)
	var owners []string // of blocks 32 to 63
	var keys []cache.Key
	segmentsOf(d, chainOf(1), 3, func(_ int, k []cache.Key, o []string) { keys, owners = k, o })
	first := nodes[owners[0]]
	u.storeAt(t, owners[0], 32, keys[:8])
	for range 64 {
		u.loadFrom(t, owners[0], 32, keys[:8])
	}
	known(t, first)
	first.tickNow(t)
	eventually(t, func() bool { return u.Owners(keys[0]) == 3 })
	for _, o := range owners { // at once
		u.loadFrom(t, o, 32, keys[:8])
	}
	require.Equal(t, 1, first.Report().Hot)
	require.EqualValues(t, 16, first.Report().Sent)
	require.EqualValues(t, 16*blockBytes, first.Report().Bytes)
	require.EqualValues(t, 65*8, first.cache.Stats().Loads[cache.Done], "those of clients alone")

	u.storeAt(t, owners[0], 32, keys) // more of it
	eventually(t, func() bool {
		grown := false
		first.ask(t.Context(), func() { grown = first.segments[keys[0]].grown })
		return grown
	})
	first.tickNow(t)
	for _, o := range owners[1:] {
		eventually(t, func() bool { return u.has(t, o, keys) })
		u.loadFrom(t, o, 32, keys)
	}

	for range 8 { // nobody reads
		first.tickNow(t)
	}
	eventually(t, func() bool { return u.Owners(keys[0]) == 0 })
	for _, o := range owners[1:] {
		n := nodes[o]
		eventually(t, func() bool {
			n.tickNow(t)
			return n.Report().Surplus == len(keys)
		})
		v := placement.NewView(1000)
		follow(t, n, v, nil, func() bool {
			return slices.Contains(v.Holders(nil, keys[3]), cluster.NodeID(o))
		})
	}
	for _, n := range nodes {
		idleNode(t, n)
	}
}

// TestEmptyNodeJoins: it draws its share of all others, which say that they have that, too, and
// no more at a time than each sends in one call.
func TestEmptyNodeJoins(t *testing.T) {
	const chains = 6
	folder, d := t.TempDir(), &changing{}
	d.set(folder, 1, "a", "b")
	a, b := startNode(t, folder, "a", d), startNode(t, folder, "b", d)
	u := openUser(t, d)
	u.store(t, d, chains, 1)
	known(t, a, b)

	c := startNode(t, folder, "c", d)
	testpoint.Set(func(point string) {
		if point == "member: read" && c.server.Report().Running > 2*2 {
			panic("more than one call of each sender")
		}
	})
	t.Cleanup(func() { testpoint.Set(nil) })
	d.set(folder, 1, "a", "b", "c")
	u.complete(t, d, chains, 1)
	for _, n := range []*node{a, b, c} {
		idleNode(t, n)
	}
	drawn := c.cache.Stats().Tiers[cache.Memory].Blocks
	require.Positive(t, drawn)
	require.EqualValues(t, drawn, a.Report().Sent+b.Report().Sent)
	require.Zero(t, c.Report().Sent+a.Report().Failed+b.Report().Failed)
	eventually(t, func() bool { return a.Report().Surplus+b.Report().Surplus == drawn })

	// What is surplus goes first.
	v := placement.NewView(1 << 16)
	since := follow(t, a, v, nil, func() bool {
		blocks, _ := v.Entries()
		return blocks == a.Report().Surplus
	})
	have := func(seed uint64) (there int) {
		segmentsOf(d, chainOf(seed), 1, func(_ int, keys []cache.Key, owners []string) {
			if owners[0] == "a" && u.has(t, "a", keys) {
				there += len(keys)
			}
		})
		return there
	}
	before := 0
	for seed := range uint64(chains) {
		before += have(seed)
	}
	surplus := a.Report().Surplus
	room := cacheKeys - a.cache.Stats().Tiers[cache.Memory].Blocks
	for k := uint64(0); k < uint64(room+surplus); k += chainKeys { // of a namespace of others
		keys := chainOf(1000 + k)
		u.storeAt(t, "a", 0, keys[:min(chainKeys, room+surplus-int(k))])
	}
	after := 0
	for seed := range uint64(chains) {
		after += have(seed)
	}
	require.Equal(t, before, after, "the blocks that a owns")
	a.tickNow(t)
	follow(t, a, v, since, func() bool {
		blocks, _ := v.Entries()
		return blocks == a.Report().Surplus
	})
	require.Less(t, a.Report().Surplus, surplus+room)
}

// TestNodeLeaves: with two copies of each block that of a lost node is made good; a node of weight
// 0 hands over all it has, and says that it has it.
func TestNodeLeaves(t *testing.T) {
	for _, name := range []string{"lost", "drains"} {
		t.Run(name, func(t *testing.T) {
			const chains = 4
			copies, after := 2, []string{"a", "c"}
			if name == "drains" {
				copies, after = 1, []string{"a", "b=0", "c"}
			}
			folder, d := t.TempDir(), &changing{}
			d.set(folder, copies, "a", "b", "c")
			nodes := []*node{}
			for _, name := range []string{"a", "b", "c"} {
				nodes = append(nodes, startNode(t, folder, name, d))
			}
			u := openUser(t, d)
			u.store(t, d, chains, copies)
			known(t, nodes...)
			d.set(folder, copies, after...)
			u.complete(t, d, chains, copies)
			for _, n := range nodes {
				idleNode(t, n)
			}
			if b := nodes[1]; name == "drains" {
				eventually(t, func() bool {
					return b.Report().Surplus == b.cache.Stats().Tiers[cache.Memory].Blocks
				})
			}
		})
	}
}

// ofB returns blocks 32 to 63 of a chain that b owns beside a, and of others c.
func ofB(folder string, others ...string) (mine []cache.Key) {
	d, without := &changing{}, &changing{}
	d.set(folder, 1, "a", "b")
	without.set(folder, 1, append(others, "a")...)
	for seed := uint64(1); mine == nil; seed++ {
		segmentsOf(d, chainOf(seed), 1, func(first int, keys []cache.Key, owners []string) {
			if first == 32 && owners[0] == "b" {
				mine = keys
			}
		})
		if mine != nil && len(others) > 0 {
			segmentsOf(without, mine[:1], 1, func(_ int, _ []cache.Key, owners []string) {
				if owners[0] != "c" {
					mine = nil
				}
			})
		}
	}
	return mine
}

// TestKilledWhileItIsSentTo: of a node that is killed then nothing is left at the one that sends.
// What was not sent is sent at the next tick.
func TestKilledWhileItIsSentTo(t *testing.T) {
	folder, d := t.TempDir(), &changing{}
	d.set(folder, 1, "a")
	a := startNode(t, folder, "a", d)
	b := startChild(t, folder, "b", pointVariable+"=cache: entered")
	u, mine := openUser(t, d), ofB(folder)
	u.storeAt(t, "a", 32, mine)
	known(t, a)
	d.set(folder, 1, "a", "b")
	var status unix.WaitStatus
	_, err := unix.Wait4(b.cmd.Process.Pid, &status, unix.WUNTRACED, nil)
	require.NoError(t, err)
	require.True(t, status.Stopped())
	b.kill()
	eventually(t, func() bool { r := a.Report(); return r.Failed == 1 && r.Pending == 1 })
	startChild(t, folder, "b")
	eventually(t, func() bool {
		a.tickNow(t)
		return u.has(t, "b", mine)
	})
	u.loadFrom(t, "b", 32, mine)
	u.loadFrom(t, "a", 32, mine)
	idleNode(t, a)
}

// TestNextNode: what was not sent to a node that has left goes to the one that has it then.
func TestNextNode(t *testing.T) {
	folder, d := t.TempDir(), &changing{}
	d.set(folder, 1, "a")
	a := startNode(t, folder, "a", d)
	b := startChild(t, folder, "b", pointVariable+"=cache: entered")
	u, mine := openUser(t, d), ofB(folder, "c")
	u.storeAt(t, "a", 32, mine)
	known(t, a)
	d.set(folder, 1, "a", "b")
	_, err := unix.Wait4(b.cmd.Process.Pid, nil, unix.WUNTRACED, nil)
	require.NoError(t, err)
	b.kill()
	eventually(t, func() bool { r := a.Report(); return r.Failed == 1 && r.Pending == 1 })
	startNode(t, folder, "c", d)
	d.set(folder, 1, "a", "c")
	eventually(t, func() bool { return u.has(t, "c", mine) })
	u.loadFrom(t, "c", 32, mine)
}

// TestStoredLate: what a client stores by an older list goes to who has it now, before it is the
// first to go.
func TestStoredLate(t *testing.T) {
	folder, d := t.TempDir(), &changing{}
	d.set(folder, 1, "a", "b")
	a, b := startNode(t, folder, "a", d), startNode(t, folder, "b", d)
	u, mine := openUser(t, d), ofB(folder)
	u.storeAt(t, "a", 32, mine)
	known(t, a)
	a.tickNow(t)
	eventually(t, func() bool { return u.has(t, "b", mine) })
	idleNode(t, a)
	require.EqualValues(t, len(mine), a.Report().Sent)
	a.tickNow(t)
	idleNode(t, a)
	require.Zero(t, a.Report().Failed+b.Report().Sent)
}

// TestNotRead: what a node cannot read from its own cache was not sent.
func TestNotRead(t *testing.T) {
	folder, d := t.TempDir(), &changing{}
	d.set(folder, 1, "a")
	a := startNode(t, folder, "a", d)
	startNode(t, folder, "b", d)
	u, mine := openUser(t, d), ofB(folder)
	u.storeAt(t, "a", 32, mine)
	known(t, a)
	require.NoError(t, a.server.Drain(t.Context()))
	d.set(folder, 1, "a", "b")
	eventually(t, func() bool { return a.Report().Failed > 0 })
	require.Zero(t, a.Report().Sent)
}

// TestSender: a node that was late is sent nothing until the next tick, and the buffer is used
// again only once no node reaches it any more.
func TestSender(t *testing.T) {
	folder, d := t.TempDir(), &changing{}
	d.set(folder, 1, "a", "b")
	a := startNode(t, folder, "a", d)
	startNode(t, folder, "b", d)
	u, mine := openUser(t, d), ofB(folder)
	var imported atomic.Int64
	send := func(s *sender, keys []cache.Key) error {
		u.storeAt(t, "a", 32, keys)
		known(t, a)
		move := placement.Move{Held: placement.Held{Segment: keys[0]}, To: cluster.NodeID("b")}
		testpoint.Set(func(point string) {
			if point == "serve: imported" {
				imported.Add(1)
			}
		})
		defer testpoint.Set(nil)
		return s.send(t.Context(), &move)
	}
	s := &sender{m: a.Member, name: "test", e: a.mine, spaces: map[[16]byte]*cluster.Space{},
		lost: map[string]int{"b": 0}}
	require.ErrorIs(t, send(s, mine[:8]), engine.ErrPeerLost)
	a.tickNow(t)
	require.NoError(t, send(s, mine[:8]))
	require.EqualValues(t, 2, imported.Swap(0))
	require.NoError(t, send(s, mine[:16]))
	require.Zero(t, imported.Swap(0))
	s.unsure = true
	require.NoError(t, send(s, mine))
	require.EqualValues(t, 2, imported.Load(), "leases are made anew")
	require.False(t, s.unsure)
	u.loadFrom(t, "b", 32, mine)
	s.closeSpaces()
}

// alone returns a node a that runs no goroutine, and a use of a segment that it owns alone.
func alone(t *testing.T) (*Member, *changing, *serve.Use) {
	folder, d := t.TempDir(), &changing{}
	d.set(folder, 1, "a")
	n := startNode(t, folder, "a", &changing{view: d.view})
	m, err := New(Config{Name: "a", Cache: n.cache})
	require.NoError(t, err)
	m.cluster = new(cluster.Cluster)
	m.arrange(d.view)
	keys := ofB(folder)
	return m, d, &serve.Use{Space: &serve.SpaceName{Name: "model"}, Store: true, Bytes: blockBytes,
		Keys: keys, Segments: []serve.Segment{{Head: keys[0], First: 32, Blocks: 32}},
		Outcomes: slices.Repeat([]cache.Outcome{cache.Done}, 32)}
}

// TestUsesWait: what clients have done before the list of nodes changes counts for what is sent;
// what waits to be counted is not counted where there is no room.
func TestUsesWait(t *testing.T) {
	m, d, use := alone(t)
	m.Used(use)
	d.set(t.TempDir(), 1, "a", "b")
	m.arrange(d.view)
	require.Equal(t, 1, m.plan.pending())

	for k := range usesMax {
		head := cache.Key{1, byte(k), byte(k >> 8)}
		m.Used(&serve.Use{Space: use.Space, Store: true, Bytes: blockBytes,
			Keys: []cache.Key{head}, Segments: []serve.Segment{{Head: head, Blocks: 1}},
			Outcomes: []cache.Outcome{cache.Done}})
	}
	require.Greater(t, usesMax, m.blocksMax())
	m.catchUp()
	require.Equal(t, m.blocksMax()+1, m.blocks)
	m.survey()
	require.LessOrEqual(t, m.blocks, m.blocksMax()+1)
}

// TestUsesAreBounded: what waits to be counted, and its keys, has a bound.
func TestUsesAreBounded(t *testing.T) {
	m, _, use := alone(t)
	long := *use
	long.Keys = make([]cache.Key, keysMax)
	m.Used(&long)
	require.Zero(t, m.Report().Unseen)
	m.Used(use)
	require.EqualValues(t, 1, m.Report().Unseen)
}

// TestParts: of very many chains that part within a segment each block is known once.
func TestParts(t *testing.T) {
	m, _, use := alone(t)
	head := use.Keys[0]
	for range 2 {
		for k := range partMax/32 + 1 {
			for i := range use.Keys {
				binary.LittleEndian.PutUint64(use.Keys[i][:], uint64(k*32+i)*0x9e3779b97f4a7c15)
			}
			m.count(use)
		}
	}
	s := m.segments[head]
	require.Len(t, s.parts, 2)
	require.Equal(t, []int{partMax, 32}, []int{len(s.parts[0].blocks), len(s.parts[1].blocks)})
	require.Equal(t, partMax+32, m.blocks)
}

// TestNotThere: a further owner is announced once all of them have got their copies.
func TestNotThere(t *testing.T) {
	m, d, use := alone(t)
	head := use.Keys[0]
	d.set(t.TempDir(), 1, "a", "b")
	m.arrange(d.view)
	for k := uint64(1); placement.Rank(m.nodes, m.id, head, 1) != 0; k++ {
		binary.BigEndian.PutUint64(head[:], k)
	}
	use.Segments[0].Head = head
	m.count(use)
	use.Store = false
	for range 64 {
		m.count(use)
	}
	m.tick()
	require.Equal(t, 1, m.waits[head])
	for _, sent := range []bool{false, true} {
		require.Empty(t, m.announced)
		m.arrived(head, sent)
		if !sent {
			require.Empty(t, m.announced)
			m.tick()
			require.Equal(t, 1, m.waits[head])
		}
	}
	require.EqualValues(t, 2, m.announced[head])
}

// TestKilledWhileItSends: of a node that is killed then nothing is left at the other one, nothing
// wrong is found there, and the next move goes through, of blocks that are used again.
func TestKilledWhileItSends(t *testing.T) {
	folder, d := t.TempDir(), &changing{}
	d.set(folder, 1, "a", "b")
	b := startNode(t, folder, "b", d)
	a := startChild(t, folder, "a") // whose directory has a alone, until it is told
	u, mine := openUser(t, d), ofB(folder)
	u.storeAt(t, "a", 32, mine)
	u.loadFrom(t, "a", 32, mine)

	standing := testpoint.Stand(t, "cache: entered")[0]
	a.tell(t, "ab")
	<-standing.Came
	a.kill()
	standing.GoOn()
	idleNode(t, b)
	found, err := u.MatchAt(t.Context(), "b", mine)
	require.NoError(t, err)
	for k, f := range found.Blocks {
		if f.There() {
			u.loadFrom(t, "b", 32+k, mine[k:k+1])
		}
	}

	testpoint.Set(nil)
	a = startChild(t, folder, "a")
	eventually(t, func() bool { return u.has(t, "a", mine) })
	u.loadFrom(t, "a", 32, mine)
	a.tell(t, "ab")
	eventually(t, func() bool { return u.has(t, "b", mine) })
	u.loadFrom(t, "b", 32, mine)
}

// TestTold: who follows from any moment on knows all, also where it was too slow, or of a process
// before, and where what there is to tell takes several parts.
func TestTold(t *testing.T) {
	const most = placement.DigestMax + 1000
	tell := &told{}
	tell.open(7, 2)
	views, sinces := make([]*placement.View, 3), make([][]byte, 3)
	for k := range views {
		views[k] = placement.NewView(2 * most)
	}
	has := map[placement.Key]bool{}
	key := func(k int) (key placement.Key) {
		binary.LittleEndian.PutUint64(key[:], uint64(k)*0x9e3779b97f4a7c15)
		return key
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	take := func(who int) bool { // one digest; false: there is none
		text, next, err := tell.await(ctx, sinces[who])
		if err != nil {
			return false
		}
		d, err := placement.DecodeDigest(text)
		require.NoError(t, err)
		require.LessOrEqual(t, len(text), placement.DigestBytesMax)
		require.NoError(t, views[who].Apply(d))
		sinces[who] = next
		return true
	}
	change := func(from, to int, there bool) {
		now := map[placement.Key]bool{}
		for k := range has {
			now[k] = true
		}
		for k := from; k < to; k++ {
			if now[key(k)] = true; !there {
				delete(now, key(k))
			}
		}
		has = now
		tell.have(now)
		tell.endChange(0, nil)
	}
	check := func(who int) {
		t.Helper()
		for take(who) {
		}
		blocks, _ := views[who].Entries()
		require.Equal(t, len(has), blocks)
		for k := range has {
			if h := views[who].Holders(nil, k); !slices.Equal(h, []uint64{7}) {
				require.Equal(t, []uint64{7}, h)
			}
		}
	}
	change(0, 10, true)
	require.True(t, take(0))
	change(5, most, true) // more than one digest
	check(0)
	require.True(t, take(1), "the first part")
	change(0, 7, false)
	change(most, most+5, true)
	check(1)
	for k := range changesMax + 1 {
		change(100+k, 101+k, k%2 == 0)
	}
	for who := range views {
		check(who)
	}
	change(0, most+5, false)
	before := tell
	tell = &told{}
	tell.open(7, 3) // the process comes again
	change(0, 3, true)
	for who := range views {
		check(who)
	}
	for d := range before.journal.Snapshot(0, nil, slices.Values([]placement.Key{key(50)})) {
		require.ErrorIs(t, views[0].Apply(d), placement.ErrStale, "of the process before")
	}
}

// TestBoundedKnowledge: a node forgets what its cache has no more.
func TestBoundedKnowledge(t *testing.T) {
	folder, d := t.TempDir(), &changing{}
	d.set(folder, 1, "a")
	a, u := startNode(t, folder, "a", d), openUser(t, d)
	for seed := range uint64(4 * cacheKeys / chainKeys) {
		u.storeAt(t, "a", 32, chainOf(seed)[32:])
		u.storeAt(t, "a", 0, chainOf(seed)[:32])
		blocks := 0
		a.ask(t.Context(), func() { blocks = a.blocks })
		require.LessOrEqual(t, blocks, a.blocksMax()+chainKeys)
	}
	_, err := New(Config{})
	require.ErrorIs(t, err, engine.ErrBounds)
}
