// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/internal/testing/etcdtest"
	"github.com/sluicehq/sluice/internal/testing/machine"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/cluster"
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
	builds  []build // of the command
	random  *rand.Rand
}

// build is one of the command.
type build struct {
	path string
	env  []string
}

// faultNode is a node, on a host of its own, with all of its files on a small filesystem.
type faultNode struct {
	name, dir string
	build     build
	cmd       *exec.Cmd
	said      figures.Tail
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
		f.eventually("the ledgers are whole again", func() bool {
			f.ask(0, "store")
			return f.missing() == ""
		})
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
		f.mend()
	}},
	{"a node is cut off from etcd", func(f *faultRun, n int) {
		f.network.Change(n, etcdHost, machine.Line{Cut: true})
		f.await(n, gone)
		f.check(n)
		f.mend()
	}},
	{"a line loses packets, and is slow", func(f *faultRun, n int) {
		f.network.Change(n, clientsHost, machine.Line{Loss: 0.03, Delay: 10 * time.Millisecond})
		f.work()
		f.check()
		f.mend()
	}},
	{"etcd is killed, and started", func(f *faultRun, _ int) {
		for _, m := range f.members {
			m.Kill()
		}
		f.eventually("the clients know it", func() bool {
			return f.all(func(r *clientReport) bool { return r.Trouble != "" })
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
		f.mend()
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
			if node.build.path == f.builds[0].path {
				node.build = f.builds[1]
			} else {
				node.build = f.builds[0]
			}
			f.start(n)
			f.whole()
		}
	}},
}

// TestClusterFaults: five nodes on hosts of their own, a real etcd, and clients that run a trace
// while all that may befall a cluster does so. No byte is wrong, nothing is missed but what was at
// a lost node alone, each operation ends, and nothing stays pinned or leased.
func TestClusterFaults(t *testing.T) {
	f := startFaultRun(t, 1, build{os.Args[0], []string{asCommand + "=1"}})
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
func startFaultRun(t *testing.T, seed uint64, other build) *faultRun {
	t.Helper()
	ran, err := machine.AsRoot(t)
	if err == nil && ran {
		return nil
	}
	f := &faultRun{T: t, builds: []build{{path: binary}, other},
		random: rand.New(rand.NewPCG(seed, 0))}
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
		f.startClient(clientSetup{Number: k, Nodes: faultNodes, Seed: seed,
			Etcd:    etcdtest.URLs(f.members),
			Address: f.network.Hosts[clientsHost].Addr.String()})
	}
	f.eventually("all clients reach all nodes", f.reached)
	f.eventually("the ledgers are stored", func() bool {
		f.ask(0, "store")
		return f.missing() == ""
	})
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
		if f.Failed() {
			f.Logf("%s: %s", n.name, n.said.Bytes())
		}
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
	n.cmd = exec.Command(n.build.path, "cache", "serve", "--config", n.file("config"))
	n.cmd.Env = append(os.Environ(), n.build.env...)
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
		if f.Failed() {
			f.Logf("client %d: %+v\n%s", setup.Number, c.report, c.said.Bytes())
		}
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

// all reports whether something is so at each client.
func (f *faultRun) all(is func(r *clientReport) bool) bool {
	f.Helper()
	good := true
	for k := range f.clients {
		good = is(f.ask(k, "look")) && good
	}
	return good
}

func (f *faultRun) eventually(what string, is func() bool) {
	f.Helper()
	for end := time.Now().Add(faultPatience); !is(); time.Sleep(20 * time.Millisecond) {
		require.True(f, time.Now().Before(end), "%s", what)
	}
}

// The states of a node as a client sees it; "": the directory has it no more.
func serving(s cluster.State) bool { return s == cluster.Serving }
func lost(s cluster.State) bool    { return s != cluster.Serving }
func gone(s cluster.State) bool    { return s == "" }

// await waits until a node is in a state for all clients.
func (f *faultRun) await(n int, is func(cluster.State) bool) {
	f.Helper()
	f.eventually("state of "+faultNodeName(n), func() bool {
		return f.all(func(r *clientReport) bool { return is(r.Nodes[faultNodeName(n)]) })
	})
}

// reached reports whether all clients reach all nodes, and know it.
func (f *faultRun) reached() bool {
	return f.all(func(r *clientReport) bool {
		for k := range f.nodes {
			if r.Nodes[faultNodeName(k)] != cluster.Serving {
				return false
			}
		}
		return r.Trouble == ""
	})
}

// missing names the blocks that a client does not find, but for those of lost nodes alone.
func (f *faultRun) missing(lost ...int) (text string) {
	for k := range f.clients {
		r := f.ask(k, "check")
		for _, n := range lost {
			delete(r.Missing, faultNodeName(n))
		}
		if len(r.Missing) > 0 {
			text += fmt.Sprintf("client %d: %v; ", k, r.Missing)
		}
	}
	return text
}

// check wants all blocks that were not at lost nodes alone. A client may be late for once.
func (f *faultRun) check(lost ...int) {
	f.Helper()
	last := ""
	f.eventually("blocks are missing", func() bool {
		last = f.missing(lost...)
		return last == ""
	})
}

// whole waits until all is as it was.
func (f *faultRun) whole() {
	f.Helper()
	f.eventually("all clients reach all nodes", f.reached)
	f.check()
}

// work waits until each client has done something more.
func (f *faultRun) work() {
	f.Helper()
	for k := range f.clients {
		from := f.ask(k, "look").Ops
		f.eventually("clients work", func() bool { return f.ask(k, "look").Ops >= from+20 })
	}
}

// mend makes all lines good ones.
func (f *faultRun) mend() {
	for a := range f.network.Hosts {
		for b := range a {
			f.network.Change(a, b, machine.Line{})
		}
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
		r := f.ask(k, "end")
		f.Logf("client %d: %d operations, %d blocks loaded", k, r.Ops, r.Hits)
		require.NotZero(f, r.Hits)
		require.NoError(f, c.cmd.Wait())
	}
	f.eventually("nothing is pinned, and all clients are gone", func() bool {
		clean := true
		for k := range f.nodes {
			r := f.stat(k)
			clean = clean && r.Clients == 0 && r.Held == 0 && r.Unproven == 0
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
	for end := time.Now().Add(10 * time.Minute); time.Now().Before(end); {
		f.bring(f.random.IntN(len(clusterFaults)), f.random.IntN(faultNodes))
	}
	f.end()
}

// clockAhead builds the command with a time.Now whose wall clock is a minute ahead: a time
// namespace of Linux moves only the clocks since the boot.
func clockAhead(t *testing.T) build {
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
	return build{path: path}
}
