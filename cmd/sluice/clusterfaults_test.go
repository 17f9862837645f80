// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	enc "encoding/binary" // the tests have a variable of that name
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/internal/testing/etcdtest"
	"github.com/sluicehq/sluice/internal/testing/machine"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/cluster"
	"github.com/sluicehq/sluice/kv/cluster/placement"
	"github.com/sluicehq/sluice/kv/trace"
)

// The hosts of the network of a faultRun: nodes, then these.
const (
	faultNodes  = 5
	etcdHost    = faultNodes
	clientsHost = faultNodes + 1

	faultClients  = 3
	faultPatience = 3 * time.Minute // for a state of processes that may hardly get to run
)

// faultRun is a cluster that faults are brought about in, while clients use it.
type faultRun struct {
	*testing.T
	network *machine.Network
	members []*etcdtest.Member
	nodes   []*faultNode
	clients []*faultClient
	builds  []string // of the command: two
}

// faultNode is a node, on a host of its own, with all of its files on a small filesystem.
type faultNode struct {
	name, dir, build string
	cmd              *exec.Cmd
	said             figures.Tail
}

func faultNodeName(k int) string { return fmt.Sprint("node-", k) }

// faultClient is a client, in a process that the test talks to.
type faultClient struct {
	cmd    *exec.Cmd
	in     io.Writer
	out    *lines
	said   figures.Tail
	report clientReport // the last one
}

// clusterFaults are the faults, each of a node. One returns once it has brought the fault about,
// has seen that it is there, and has mended it.
var clusterFaults = []struct {
	name  string
	bring func(f *faultRun, n int)
}{
	{"a node is killed, and comes back with its memory", func(f *faultRun, n int) {
		f.nodes[n].kill()
		f.await(n, lost)
		f.check(n)
		f.await(n, gone)
		f.check(n)
		f.start(n)
	}},
	{"a node comes back without its memory", func(f *faultRun, n int) {
		f.nodes[n].kill()
		require.NoError(f, os.Remove(f.nodes[n].file("memory")))
		require.NoError(f, os.Remove(f.nodes[n].file("disk")))
		f.start(n)
		f.await(n, serving)
		f.check(n)
		f.store()
	}},
	{"a node comes back with memory of an earlier time", func(f *faultRun, n int) {
		memory := f.nodes[n].file("memory")
		f.nodes[n].kill()
		before, err := os.ReadFile(memory)
		require.NoError(f, err)
		f.start(n)
		f.await(n, serving)
		f.work()
		f.nodes[n].kill()
		require.NoError(f, os.WriteFile(memory, before, 0o600))
		f.start(n)
	}},
	{"a node stands still", func(f *faultRun, n int) {
		f.nodes[n].signal(f, syscall.SIGSTOP)
		f.await(n, lost)
		f.check(n)
		f.await(n, gone)
		f.check(n)
		f.nodes[n].signal(f, syscall.SIGCONT)
	}},
	{"a node is cut off from its peers", func(f *faultRun, n int) {
		for k := range f.network.Hosts {
			if k != etcdHost {
				f.network.Change(n, k, machine.Line{Cut: true})
			}
		}
		f.await(n, lost)
		f.check(n)
		f.network.Mend()
	}},
	{"a node is cut off from etcd", func(f *faultRun, n int) {
		f.network.Change(n, etcdHost, machine.Line{Cut: true})
		f.await(n, gone)
		f.check(n)
		f.network.Mend()
	}},
	{"a line loses packets, and is slow", func(f *faultRun, n int) {
		f.network.Change(n, clientsHost, machine.Line{Loss: 0.03, Delay: 10 * time.Millisecond})
		f.work()
		f.check()
		f.network.Mend()
	}},
	{"etcd is killed, and started", func(f *faultRun, _ int) {
		for _, m := range f.members {
			m.Kill()
		}
		f.eventually("the clients know it", func() bool {
			return f.all("look", func(r *clientReport) bool { return r.Trouble != "" })
		})
		f.check()
		f.work()
		for _, m := range f.members {
			m.Start()
		}
	}},
	{"etcd is slow, and a member of it stands still", func(f *faultRun, n int) {
		for k := range f.network.Hosts {
			if k != etcdHost {
				f.network.Change(k, etcdHost, machine.Line{Delay: 150 * time.Millisecond})
			}
		}
		m := f.members[n%len(f.members)]
		m.Signal(syscall.SIGSTOP)
		f.work()
		f.check()
		m.Signal(syscall.SIGCONT)
		f.network.Mend()
	}},
	{"the disk of a node is full", func(f *faultRun, n int) {
		full, err := os.Create(f.nodes[n].file("full"))
		require.NoError(f, err)
		for err == nil {
			_, err = full.Write(make([]byte, 64<<10))
		}
		require.ErrorIs(f, err, unix.ENOSPC)
		require.NoError(f, full.Close())
		f.work()
		f.check()
		f.nodes[n].kill()
		f.start(n)
		f.await(n, serving)
		f.check()
		require.NoError(f, os.Remove(full.Name()))
	}},
	{"another version of each node, one by one", func(f *faultRun, _ int) {
		for n, node := range f.nodes {
			node.stop(f)
			node.build = f.builds[1-slices.Index(f.builds, node.build)]
			f.start(n)
			f.whole()
		}
	}},
}

// TestClusterFaults: five nodes on hosts of their own, a real etcd, and clients that run a trace
// while all that may befall a cluster does so. No byte is wrong, nothing is missed but what was at
// a lost node alone, each operation ends, and nothing stays pinned or leased.
func TestClusterFaults(t *testing.T) {
	f := startFaultRun(t, 1, os.Args[0])
	if f == nil {
		return
	}
	for k := range clusterFaults {
		f.bring(k, k%faultNodes)
	}
	f.end()
}

func (f *faultRun) bring(fault, n int) {
	f.Logf("%s: %s", faultNodeName(n), clusterFaults[fault].name)
	clusterFaults[fault].bring(f, n)
	f.whole()
}

// startFaultRun starts a cluster with its clients; nil: it was all done in another process.
func startFaultRun(t *testing.T, seed uint64, other string) *faultRun {
	t.Helper()
	ran, err := machine.AsRoot(t)
	if err == nil && ran {
		return nil
	}
	f := &faultRun{T: t, builds: []string{binary, other}}
	if err == nil {
		f.network, err = machine.NewNetwork(clientsHost+1, seed)
	}
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	t.Cleanup(func() { require.NoError(t, f.network.Close()) })
	at := f.network.Hosts[etcdHost]
	f.members = etcdtest.StartOn(t, 3, at.Addr.String(), at.Do)
	for k := range faultNodes {
		f.prepare(k)
		f.start(k)
	}
	for k := range faultClients {
		f.startClient(clientSetup{k, seed, etcdtest.URLs(f.members)})
	}
	f.store()
	return f
}

// prepare makes the filesystem and the config of a node.
func (f *faultRun) prepare(k int) {
	n := &faultNode{name: faultNodeName(k), dir: f.TempDir(), build: f.builds[k%2]}
	f.nodes = append(f.nodes, n)
	// With room for new files while the kernel has not let go of removed ones.
	if err := unix.Mount("tmpfs", n.dir, "tmpfs", 0, "size=40m"); err != nil {
		machine.NeedsDisk(f, "mount a tmpfs: "+err.Error(), "run the test as root")
	}
	f.Cleanup(func() {
		n.kill()
		_ = unix.Unmount(n.dir, unix.MNT_DETACH)
		f.Logf("%s: %s", n.name, n.said.Bytes())
	})
	urls, err := json.Marshal(etcdtest.URLs(f.members))
	require.NoError(f, err)
	listen := f.network.Hosts[k].Addr.String() + ":7000"
	require.NoError(f, os.WriteFile(n.file("config"), fmt.Appendf(nil, `
name = %q
socket = %q
listen = [%q]
plaintext = true
blocks = 8192
[memory]
path = %q
bytes = "12MiB"
[[disk]]
path = %q
bytes = "6MiB"
[cluster]
etcd = %s
addresses = ["tcp:%s"]
`, n.name, n.file("socket"), listen, n.file("memory"), n.file("disk"), urls, listen), 0o600))
}

func (n *faultNode) file(name string) string { return filepath.Join(n.dir, name) }

// start starts a node, which takes its files when the process before has ended as a whole.
func (f *faultRun) start(k int) {
	n := f.nodes[k]
	n.cmd = exec.Command(n.build, "cache", "serve", "--config", n.file("config"))
	n.cmd.Env = append(os.Environ(), asCommand+"=1") // which a build of the test is then
	n.cmd.Stdout, n.cmd.Stderr = &n.said, &n.said
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(f, f.network.Hosts[k].Start(n.cmd))
}

func (n *faultNode) kill() {
	if n.cmd != nil && n.cmd.ProcessState == nil {
		_ = n.cmd.Process.Kill()
		_ = n.cmd.Wait()
	}
}

func (n *faultNode) signal(f *faultRun, s syscall.Signal) {
	require.NoError(f, n.cmd.Process.Signal(s))
}

// stop ends a node as a service manager does.
func (n *faultNode) stop(f *faultRun) {
	n.signal(f, syscall.SIGTERM)
	late := time.AfterFunc(faultPatience, func() { _ = n.cmd.Process.Signal(syscall.SIGQUIT) })
	defer late.Stop()
	require.NoError(f, n.cmd.Wait(), "%s", n.name)
}

func (f *faultRun) startClient(setup clientSetup) {
	text, err := json.Marshal(setup)
	require.NoError(f, err)
	c := &faultClient{cmd: exec.Command(os.Args[0])}
	c.cmd.Env = append(os.Environ(), asClient+"="+string(text))
	c.cmd.Stderr = &c.said
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	c.in, err = c.cmd.StdinPipe()
	require.NoError(f, err)
	out, err := c.cmd.StdoutPipe()
	require.NoError(f, err)
	require.NoError(f, f.network.Hosts[clientsHost].Start(c.cmd))
	c.out = readLines(out)
	f.clients = append(f.clients, c)
	f.Cleanup(func() {
		if c.cmd.ProcessState == nil {
			_ = c.cmd.Process.Signal(syscall.SIGQUIT) // which has it say where it is
			_ = c.cmd.Wait()
		}
		f.Logf("client %d: %+v\n%s", setup.Number, c.report, c.said.Bytes())
	})
}

// ask tells a client something, and returns how it is then.
func (f *faultRun) ask(k int, what string) *clientReport {
	f.Helper()
	c := f.clients[k]
	_, err := fmt.Fprintln(c.in, what)
	require.NoError(f, err, "client %d", k)
	select {
	case line, is := <-c.out.c:
		require.True(f, is, "client %d has ended", k)
		c.report = clientReport{}
		require.NoError(f, json.Unmarshal([]byte(line), &c.report))
	case <-time.After(faultPatience):
		require.Fail(f, "no answer", "client %d: %s", k, what)
	}
	r := &c.report
	require.Zero(f, r.Wrong, "blocks with other bytes")
	require.Zero(f, r.Landed, "writes after the end of their call")
	require.Less(f, r.Over, faultPatience/3, "beyond the limit of an operation")
	require.Empty(f, r.Error)
	return r
}

// all tells each client something, and reports whether something is so at all of them then.
func (f *faultRun) all(what string, is func(r *clientReport) bool) bool {
	f.Helper()
	good := true
	for k := range f.clients {
		good = is(f.ask(k, what)) && good
	}
	return good
}

func (f *faultRun) eventually(what string, is func() bool) {
	f.Helper()
	for end := time.Now().Add(faultPatience); !is(); time.Sleep(20 * time.Millisecond) {
		require.True(f, time.Now().Before(end), "%s", what)
	}
}

// What a node is for a client; "": the directory has it no more.
func serving(s cluster.State) bool { return s == cluster.Serving }
func lost(s cluster.State) bool    { return s != cluster.Serving }
func gone(s cluster.State) bool    { return s == "" }

// await waits until a node is in a state for all clients.
func (f *faultRun) await(n int, is func(cluster.State) bool) {
	f.Helper()
	f.eventually("state of "+faultNodeName(n), func() bool {
		return f.all("look", func(r *clientReport) bool { return is(r.Nodes[faultNodeName(n)]) })
	})
}

// whole waits until clients reach all nodes, and find all that was stored.
func (f *faultRun) whole() {
	f.Helper()
	for n := range f.nodes {
		f.await(n, serving)
	}
	f.eventually("etcd does not answer", func() bool {
		return f.all("look", func(r *clientReport) bool { return r.Trouble == "" })
	})
	f.check()
}

// finds reports whether clients find all blocks of the ledgers but those of lost nodes alone.
func (f *faultRun) finds(lost ...int) bool {
	return f.all("check", func(r *clientReport) bool {
		for _, n := range lost {
			delete(r.Missing, faultNodeName(n))
		}
		return len(r.Missing) == 0
	})
}

// check wants them found. A client may be late for once.
func (f *faultRun) check(lost ...int) {
	f.Helper()
	f.eventually("blocks are missing", func() bool { return f.finds(lost...) })
}

// store stores the ledgers.
func (f *faultRun) store() {
	f.Helper()
	for n := range f.nodes {
		f.await(n, serving)
	}
	f.eventually("the ledgers are stored", func() bool {
		f.ask(0, "store")
		return f.finds()
	})
}

// work waits until each client has done something more.
func (f *faultRun) work() {
	f.Helper()
	for k := range f.clients {
		from := f.ask(k, "look").Ops
		f.eventually("clients work", func() bool { return f.ask(k, "look").Ops >= from+20 })
	}
}

// stat is what the command says of a node, on its host.
func (f *faultRun) stat(k int) (r serve.Report) {
	c, stdout, stderr := command(f.T, "cache", "stat", "--json", "--timeout", "1m", "--server",
		f.nodes[k].file("socket"))
	require.NoError(f, f.network.Hosts[k].Start(c))
	require.NoError(f, c.Wait(), "%s", stderr)
	require.NoError(f, json.Unmarshal(stdout.Bytes(), &r))
	return r
}

// end ends the clients, and wants nothing to be left of them at the nodes.
func (f *faultRun) end() {
	for k, c := range f.clients {
		require.NotZero(f, f.ask(k, "end").Hits)
		require.NoError(f, c.cmd.Wait())
	}
	f.eventually("nothing is pinned, and nodes alone are clients of nodes", func() bool {
		clean := true
		for k := range f.nodes {
			r := f.stat(k)
			clean = clean && r.Clients == faultNodes && r.Held == 0 && r.Unproven == 0
		}
		return clean
	})
	for _, n := range f.nodes {
		n.stop(f)
	}
}

// TestSoakClusterFaults brings faults about at random for ten minutes. Half of the nodes have a
// clock that is a minute ahead, and each gets the other one with the other version.
func TestSoakClusterFaults(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	f := startFaultRun(t, seed, clockAhead(t))
	if f == nil {
		return
	}
	random := rand.New(rand.NewPCG(seed, 0))
	for end := time.Now().Add(10 * time.Minute); time.Now().Before(end); {
		f.bring(random.IntN(len(clusterFaults)), random.IntN(faultNodes))
	}
	f.end()
}

// clockAhead builds the command with a time.Now whose wall clock is a minute ahead: a time
// namespace of Linux moves only the clocks since the boot.
func clockAhead(t *testing.T) string {
	t.Helper()
	root, err := exec.Command("go", "env", "GOROOT").Output()
	require.NoError(t, err)
	file := filepath.Join(strings.TrimSpace(string(root)), "src", "time", "time.go")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	const now = "sec, nsec, mono := runtimeNow()\n"
	require.Contains(t, string(text), "func Now() Time {\n\t"+now)
	dir := t.TempDir()
	mine := filepath.Join(dir, "time.go")
	require.NoError(t, os.WriteFile(mine, []byte(strings.Replace(string(text), "\t"+now,
		"\t"+now+"\tsec += 60\n", 1)), 0o600))
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{file: mine}})
	require.NoError(t, err)
	list, path := filepath.Join(dir, "overlay"), filepath.Join(dir, "sluice")
	require.NoError(t, os.WriteFile(list, overlay, 0o600))
	c := exec.Command("go", "build", "-overlay", list, "-o", path, ".")
	c.Env = append(os.Environ(), "GOFLAGS=-trimpath -buildvcs=false")
	out, err := c.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return path
}

// asClient makes the test binary a client of TestClusterFaults; it has a clientSetup in JSON.
const asClient = "SLUICE_TEST_CLUSTER_CLIENT"

const (
	clientBlock  = 8 << 10 // bytes
	clientRoom   = 48      // blocks that a client has memory for, and of a request at most
	clientLimit  = 3 * time.Second
	ledgerChains = 16
	ledgerKeys   = 16 // of a chain: segments of 1, 1, 2, 4 and 8 blocks
)

// namespaces are those of the trace, and of blocks that are stored in the beginning and read ever
// since: the ledgers.
var (
	namespaces = map[string]string{"trace": `{"memory_quota":4194304}`,
		"single": `{"priority":7}`, "double": `{"priority":7,"copies":2}`}
	ledgers = []string{"single", "double"}
)

// clientSetup is what a client is told.
type clientSetup struct {
	Number int
	Seed   uint64
	Etcd   []string
}

// clientReport is what a client has seen. Its last fields are of the command that it answers.
type clientReport struct {
	Ops, Hits int
	Wrong     int           // blocks that were Done and had other bytes
	Landed    int           // bytes that were written after their call had ended
	Over      time.Duration // the most that an operation took beyond its limit
	Error     string        // the first that no fault explains
	Nodes     map[string]cluster.State
	Trouble   string
	Missing   map[string]int // blocks of the ledgers: of single ones by their node, and "double"
}

// traceClient is a process that serves a model: it handles the requests of a trace, one by one, and
// obeys its standard input in between.
type traceClient struct {
	clientSetup
	*clusterUser
	blocks cacheUser // its memory, which has zeros between two operations
	report clientReport
	spaces map[string]*cluster.Space
}

func runTraceClient(setup string) (err error) {
	c := &traceClient{spaces: map[string]*cluster.Space{}}
	if err := json.Unmarshal([]byte(setup), &c.clientSetup); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), faultPatience)
	defer cancel()
	for name, value := range namespaces {
		if err := putNamespace(ctx, c.Etcd[0], name, value); err != nil {
			return err
		}
	}
	flags := clusterFlags{etcd: c.Etcd}
	if err := flags.backend.Set("tcp:plaintext=true,listen=:0"); err != nil {
		return err
	}
	if c.clusterUser, err = flags.open(ctx, fmt.Sprint("client ", c.Number)); err != nil {
		return err
	}
	c.blocks = cacheUser{engine: c.engine, block: clientBlock, room: clientRoom}
	if c.blocks.memory, err = c.engine.Alloc(clientRoom*clientBlock,
		engine.AllocOptions{}); err != nil {
		return err
	}
	c.blocks.region, err = c.engine.RegisterPrivate("blocks", c.blocks.memory.Segment())
	if err == nil {
		err = c.Attach(ctx, c.blocks.region)
	}
	for name := range namespaces {
		if err == nil {
			c.spaces[name], err = c.Namespace(ctx, name, [32]byte{})
		}
	}
	if err != nil {
		return err
	}
	commands := make(chan string)
	go func() {
		for s := bufio.NewScanner(os.Stdin); s.Scan(); {
			commands <- s.Text()
		}
		close(commands)
	}()
	requests := trace.NewGenerator(c.Seed) // of all clients: each has half of them
	for {
		select {
		case what, more := <-commands:
			if !more {
				return io.ErrUnexpectedEOF // the test is gone
			}
			c.obey(what)
			if err := json.NewEncoder(os.Stdout).Encode(&c.report); err != nil || what == "end" {
				return err
			}
		case <-time.After(time.Millisecond):
			if r := requests.Next(); (c.report.Ops+c.Number)%2 == 0 {
				c.handle(r.HashIDs[:min(len(r.HashIDs), clientRoom)])
			} else {
				c.report.Ops++
			}
		}
	}
}

// obey does what the test says, and brings the report up to date.
func (c *traceClient) obey(what string) {
	s := c.Stats()
	c.report.Nodes, c.report.Trouble, c.report.Missing = map[string]cluster.State{}, s.Trouble,
		map[string]int{}
	for _, n := range s.Nodes {
		c.report.Nodes[n.Name] = n.State
	}
	for _, name := range ledgers {
		for chain := range ledgerChains {
			keys := ledgerOf(chain)
			switch what {
			case "store":
				c.store(name, keys, 0)
			case "check":
				for k, o := range c.load(name, keys, nil) {
					if o != cache.Done {
						c.report.Missing[c.missed(name, keys, k)]++
					}
				}
			}
		}
	}
	if what == "end" {
		ctx, cancel := context.WithTimeout(context.Background(), faultPatience)
		defer cancel()
		c.settle()
		err := c.Cluster.Close(ctx)
		c.fail("end", errors.Join(err, c.blocks.region.Close(), c.end())) // nobody has a lease
	}
}

// missed is where a block of a ledger is counted that is not there.
func (c *traceClient) missed(name string, keys []cache.Key, k int) string {
	if name != "single" {
		return name
	}
	var bids []placement.Node
	for n := range faultNodes {
		sum := sha256.Sum256([]byte(faultNodeName(n)))
		bids = append(bids, placement.Node{ID: enc.LittleEndian.Uint64(sum[:]), Weight: 1})
	}
	_, first := placement.SegmentOf(k)
	return faultNodeName(placement.Owners(nil, bids, keys[first], 1)[0])
}

func ledgerOf(chain int) []cache.Key {
	keys := make([]cache.Key, ledgerKeys)
	for k := range keys {
		enc.BigEndian.PutUint64(keys[k][:], 1<<40+uint64(chain))
		enc.BigEndian.PutUint64(keys[k][8:], uint64(k))
	}
	return keys
}

func (c *traceClient) fail(what string, err error) {
	if err != nil && c.report.Error == "" {
		c.report.Error = what + ": " + err.Error()
	}
}

// op runs an operation within its limit. Without the proof that nothing moves any more the memory
// is detached, and attached anew.
func (c *traceClient) op(what string, do func(ctx context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), clientLimit)
	defer cancel()
	began := time.Now()
	err := do(ctx)
	c.report.Over = max(c.report.Over, time.Since(began)-clientLimit)
	c.report.Ops++
	if errors.Is(err, engine.ErrUnproven) {
		long, cancel := context.WithTimeout(context.Background(), faultPatience)
		defer cancel()
		for err != nil && long.Err() == nil {
			err = c.Detach(long, c.blocks.region)
		}
		err = errors.Join(err, c.Attach(long, c.blocks.region))
	}
	c.fail(what, err)
}

// settle looks whether a node has changed the memory since the last operation.
func (c *traceClient) settle() {
	mem := c.blocks.memory.Bytes()
	c.report.Landed += len(mem) - bytes.Count(mem, []byte{0})
}

// load loads blocks of a chain, with a token all or none, and looks at every byte of what is there.
func (c *traceClient) load(name string, keys []cache.Key, token *cluster.Token) []cache.Outcome {
	c.settle()
	defer clear(c.blocks.memory.Bytes())
	outcomes := make([]cache.Outcome, len(keys))
	c.op("load", func(ctx context.Context) error {
		if token == nil {
			got, err := c.spaces[name].Load(ctx, keys, c.blocks.place(len(keys)))
			copy(outcomes, got)
			return err
		}
		err := c.spaces[name].LoadPinned(ctx, token, 0, keys, c.blocks.place(len(keys)))
		if err == nil {
			outcomes = slices.Repeat([]cache.Outcome{cache.Done}, len(keys))
		} else if errors.Is(err, cluster.ErrTokenLost) && !errors.Is(err, engine.ErrUnproven) {
			err = nil
		}
		return err
	})
	for k, o := range outcomes {
		if o == cache.Done {
			c.report.Hits++
			if !c.blocks.verify(k, &keys[k]) {
				c.report.Wrong++
			}
		}
	}
	return outcomes
}

// store stores the blocks of a chain from one on.
func (c *traceClient) store(name string, keys []cache.Key, from int) {
	c.settle()
	defer clear(c.blocks.memory.Bytes())
	c.blocks.fill(keys[from:])
	c.op("store", func(ctx context.Context) error {
		_, err := c.spaces[name].Behind(keys[:from]).Store(ctx, keys[from:],
			c.blocks.place(len(keys)-from))
		return err
	})
}

// handle loads what there is of a request's blocks, at times by a token, and stores the others.
func (c *traceClient) handle(ids []uint64) {
	keys, found := make([]cache.Key, len(ids)), 0
	for k, id := range ids {
		enc.BigEndian.PutUint64(keys[k][:], id)
	}
	var token *cluster.Token
	c.op("match", func(ctx context.Context) (err error) {
		if len(keys)%3 == 0 {
			token, err = c.spaces["trace"].MatchPinned(ctx, 10*time.Second, keys)
			return err
		}
		m, err := c.spaces["trace"].Match(ctx, keys)
		found = m.Prefix
		return err
	})
	if token != nil {
		found = token.Prefix
	}
	if found > 0 {
		c.load("trace", keys[:found], token)
	}
	if token != nil {
		_ = token.Close() // a node that is gone has no pin
	}
	if found < len(keys) {
		c.store("trace", keys, found)
	}
}

// putNamespace puts what a namespace may have into an etcd, once that answers.
func putNamespace(ctx context.Context, url, name, value string) error {
	body, err := json.Marshal(map[string]any{"key": []byte("sluice/namespaces/" + name),
		"value": []byte(value)})
	for c := (http.Client{Timeout: clientLimit}); err == nil; err = ctx.Err() {
		a, failed := c.Post(url+"/v3/kv/put", "application/json", bytes.NewReader(body))
		if failed == nil && a.Body.Close() == nil && a.StatusCode == http.StatusOK {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return err
}
