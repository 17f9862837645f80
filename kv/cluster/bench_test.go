// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/directory"
)

const (
	hopVariable = "SLUICE_TEST_HOP" // folder of a node one hop away, which a child process is
	hopName     = "far"
	hopMemory   = 128 << 20
	hopKeys     = 64
)

func init() { // before any test: of a child process it is all
	if folder, is := os.LookupEnv(hopVariable); is {
		fmt.Fprintln(os.Stderr, serveHop(folder))
		os.Exit(1)
	}
}

func openHopEngine(name string) (*engine.Engine, error) {
	b, err := tcp.New(tcp.Config{Plaintext: true, Listen: "127.0.0.1:0"})
	if err != nil {
		return nil, err
	}
	return engine.Open(engine.Config{Name: name, Plaintext: true, Backends: []driver.Backend{b}})
}

// serveHop serves a cache over TCP, and bytes over a bare socket.
func serveHop(folder string) error {
	ctx := context.Background()
	e, err := openHopEngine(hopName)
	if err != nil {
		return err
	}
	c, err := cache.Open(ctx, cache.Config{Engine: e, Memory: cache.MemoryConfig{
		Path: filepath.Join(folder, "memory"), Bytes: hopMemory}})
	if err != nil {
		return err
	}
	s, err := serve.New(serve.Config{Cache: c, Engine: e})
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	bare, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	go func() { _ = e.Serve(ctx, l) }()
	go func() {
		conn, err := bare.Accept()
		bytes := make([]byte, hopMemory/2)
		for ask := make([]byte, 8); err == nil; {
			if _, err = io.ReadFull(conn, ask); err == nil {
				_, err = conn.Write(bytes[:binary.LittleEndian.Uint64(ask)])
			}
		}
	}()
	fmt.Println(l.Addr(), bare.Addr())
	return s.Run(ctx)
}

// hop is a user of a cluster with one node that has all blocks, and 63 that have none.
type hop struct {
	mem    []byte
	keys   []cache.Key
	place  serve.Place
	space  *Space
	direct *serve.Space // of a client of that node alone
	to     serve.Place  // its place
	bare   net.Conn
}

func openHop(b *testing.B, block uint64) *hop {
	b.Helper()
	folder, err := os.MkdirTemp("/dev/shm", "sluice-test-*")
	require.NoError(b, err)
	b.Cleanup(func() { _ = os.RemoveAll(folder) })
	far := exec.Command(os.Args[0])
	far.Env = append(os.Environ(), hopVariable+"="+folder)
	far.Stderr = os.Stderr
	far.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := far.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, far.Start())
	b.Cleanup(func() {
		_ = far.Process.Kill()
		_ = far.Wait()
	})
	var at, bare string
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(b, err)
	_, err = fmt.Sscan(line, &at, &bare)
	require.NoError(b, err)

	h := &hop{keys: chainOf(1)}
	nodes := []directory.Node{{Name: hopName, Weight: 1 << 31, Addresses: []string{"tcp:" + at}}}
	for k := range 63 {
		nodes = append(nodes, directory.Node{Name: fmt.Sprint("none", k), Weight: 1,
			Addresses: []string{"unix:/no/such"}})
	}
	d, err := directory.List(nodes, nil)
	require.NoError(b, err)
	region := func(e *engine.Engine) (mem []byte, p serve.Place) {
		m, err := e.Alloc(hopKeys*block, engine.AllocOptions{})
		require.NoError(b, err)
		p = serve.Place{Stride: block, Run: block}
		p.Region, err = e.RegisterPrivate("kv", m.Segment())
		require.NoError(b, err)
		for k := range uint32(hopKeys) {
			p.Slots = append(p.Slots, k)
		}
		return m.Bytes(), p
	}
	e, err := openHopEngine("user")
	require.NoError(b, err)
	c, err := Open(b.Context(), Config{Engine: e, Directory: d, Limit: time.Minute})
	require.NoError(b, err)
	h.mem, h.place = region(e)
	require.NoError(b, c.Attach(b.Context(), h.place.Region))
	h.space, err = c.Namespace(b.Context(), "model", [32]byte{1})
	require.NoError(b, err)
	outcomes, err := h.space.Store(b.Context(), h.keys, h.place)
	require.NoError(b, err)
	require.Equal(b, slices.Repeat([]cache.Outcome{cache.Done}, hopKeys), outcomes)

	other, err := openHopEngine("other")
	require.NoError(b, err)
	client, err := serve.Dial(b.Context(), other, "tcp", at)
	require.NoError(b, err)
	_, h.to = region(other)
	require.NoError(b, client.Attach(b.Context(), h.to.Region))
	h.direct, err = client.Namespace(b.Context(), "model", [32]byte{1})
	require.NoError(b, err)
	h.bare, err = net.Dial("tcp", bare)
	require.NoError(b, err)
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(b, c.Close(ctx))
		require.NoError(b, client.Close(ctx))
		require.NoError(b, e.Close())
		require.NoError(b, other.Close())
		require.NoError(b, h.bare.Close())
	})
	return h
}

// first is a place of the first blocks.
func first(p serve.Place, n int) serve.Place {
	p.Slots = p.Slots[:n]
	return p
}

// BenchmarkHop loads 64 blocks of 1 MiB, and less, that are one hop away, each time beside as many
// bytes over a bare socket into the same memory: of_socket is the rate beside that of the socket,
// by the sum of the times.
func BenchmarkHop(b *testing.B) {
	for _, block := range []uint64{64 << 10, 256 << 10, 1 << 20} {
		b.Run(fmt.Sprint(block>>10, "KiB"), func(b *testing.B) {
			h := openHop(b, block)
			bytes := hopKeys * block
			var loads, sockets time.Duration
			for b.Loop() {
				began := time.Now()
				outcomes, err := h.space.Load(b.Context(), h.keys, h.place)
				loads += time.Since(began)
				if err != nil || slices.ContainsFunc(outcomes, func(o cache.Outcome) bool {
					return o != cache.Done
				}) {
					b.Fatal(outcomes, err)
				}
				began = time.Now()
				_, err = h.bare.Write(binary.LittleEndian.AppendUint64(nil, bytes))
				if err == nil {
					_, err = io.ReadFull(h.bare, h.mem)
				}
				sockets += time.Since(began)
				require.NoError(b, err)
			}
			b.ReportMetric(float64(sockets)/float64(loads), "of_socket")
			b.ReportMetric(float64(bytes)*float64(b.N)/float64(loads), "GB/s")
		})
	}
}

// BenchmarkLocate loads blocks of 4 KiB of one node of 64 as a cluster does, each time beside the
// same by a client of that node: added_µs is the difference of the medians.
func BenchmarkLocate(b *testing.B) {
	for _, n := range []int{1, hopKeys} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			h := openHop(b, 4<<10)
			keys := h.keys[:n]
			var times [2][]time.Duration
			for b.Loop() {
				for k, load := range []func() ([]cache.Outcome, error){
					func() ([]cache.Outcome, error) {
						return h.space.Load(b.Context(), keys, first(h.place, n))
					},
					func() ([]cache.Outcome, error) {
						return h.direct.Load(b.Context(), keys, first(h.to, n))
					},
				} {
					began := time.Now()
					outcomes, err := load()
					times[k] = append(times[k], time.Since(began))
					if err != nil || outcomes[n-1] != cache.Done {
						b.Fatal(outcomes, err)
					}
				}
			}
			median := func(of []time.Duration) float64 {
				slices.Sort(of)
				return float64(of[len(of)/2]) / float64(time.Microsecond)
			}
			b.ReportMetric(median(times[0])-median(times[1]), "added_µs")
			b.ReportMetric(median(times[1]), "direct_µs")
		})
	}
}
