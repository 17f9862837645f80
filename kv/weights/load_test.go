// SPDX-License-Identifier: Apache-2.0

package weights

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// content is what byte i of a tensor is.
func content(name string, n int64) []byte {
	b := make([]byte, n)
	seed := uint64(len(name)) * 7919
	for _, c := range []byte(name) {
		seed = seed*131 + uint64(c)
	}
	rng := rand.New(rand.NewPCG(seed, 1))
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

// shard makes a file of tensors with these many bytes.
func shard(t testing.TB, file string, sizes ...int) Source {
	t.Helper()
	var list []Tensor
	for i, n := range sizes {
		list = append(list, Tensor{Name: fmt.Sprintf("%s.%d", file, i), Type: "U8",
			Shape: []uint64{uint64(n)}})
	}
	var out bytes.Buffer
	err := Write(&out, list, map[string]string{"format": "pt"}, func(x Tensor) (io.Reader, error) {
		return bytes.NewReader(content(x.Name, x.Len)), nil
	})
	require.NoError(t, err)
	return source(file, out.Bytes())
}

// model makes one of two files: neighbours, small and empty ones, and one larger than a piece.
func model(t testing.TB) *Model {
	t.Helper()
	m, err := Open(shard(t, "a", 1000, 7, 0, 0, 64, 20000, 1), shard(t, "b", 0),
		shard(t, "c", 300, 5000, 1, 1, 0))
	require.NoError(t, err)
	return m
}

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func load(t testing.TB, m *Model, cfg Config) *Load {
	t.Helper()
	l, err := m.Load(within(t), cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

func same(t testing.TB, x Loaded) {
	t.Helper()
	if !bytes.Equal(x.Bytes, content(x.Name, x.Len)) || int64(cap(x.Bytes)) != x.Len {
		t.Errorf("tensor %s of %d bytes has others, or room for %d", x.Name, x.Len, cap(x.Bytes))
	}
}

// TestLoad reads into memory of several sizes, and checks every byte when it arrives. Where all
// fits, also at the end.
func TestLoad(t *testing.T) {
	testkit.CheckLeaks(t)
	m := model(t)
	for _, c := range []struct{ memory, piece, readers int }{
		{20000, 512, 3}, {20000, 1 << 20, 1}, {20001, 7, 2}, {26000, 4096, 4}, {1 << 20, 4096, 8},
		{1 << 20, 1, 2}, {1 << 20, 1 << 20, 4},
	} {
		l := load(t, m, Config{Memory: make([]byte, c.memory), Piece: c.piece, Readers: c.readers})
		var all []Loaded
		for x, err := range l.All(within(t)) {
			require.NoError(t, err, "%+v", c)
			same(t, x)
			all = append(all, x)
			if c.memory < 1<<20 {
				require.NoError(t, l.Release(x.Name))
			}
		}
		require.Len(t, all, len(m.Tensors()), "%+v: tensors of", c)
		require.NoError(t, l.Close())
		if c.memory == 1<<20 {
			for _, x := range all {
				same(t, x)
			}
		}
	}
}

// counting counts reads, and those at a time.
type counting struct {
	io.ReaderAt
	reads, now, most atomic.Int64
	gate             chan struct{} // nil: open
}

func (c *counting) ReadAt(b []byte, at int64) (int, error) {
	c.reads.Add(1)
	now := c.now.Add(1)
	for most := c.most.Load(); now > most && !c.most.CompareAndSwap(most, now); most =
		c.most.Load() {
	}
	defer c.now.Add(-1)
	if c.gate != nil {
		<-c.gate
	}
	return c.ReaderAt.ReadAt(b, at)
}

// TestPieces wants few reads of many neighbours, each of at most a piece.
func TestPieces(t *testing.T) {
	src := shard(t, "a", slices.Repeat([]int{100}, 1000)...)
	count := &counting{ReaderAt: src.ReaderAt}
	src.ReaderAt = count
	m, err := Open(src)
	require.NoError(t, err)
	count.reads.Store(0)
	l := load(t, m, Config{Memory: make([]byte, 100_000), Piece: 10_000})
	for x, err := range l.All(within(t)) {
		require.NoError(t, err)
		same(t, x)
	}
	require.EqualValues(t, 10, count.reads.Load(),
		"reads of at most 10,000 bytes for 1,000 tensors of 100")
	if n := count.most.Load(); n > readersDefault {
		t.Errorf("%d reads at a time", n)
	}
}

// TestTwins has a file whose first tensor begins at the offset where the last of the other file
// ends.
func TestTwins(t *testing.T) {
	first := shard(t, "a", 64)
	var second bytes.Buffer
	pad := map[string]string{}
	for offset := int64(0); offset != first.Size; pad["pad"] += "x" {
		second.Reset()
		list := []Tensor{{Name: "b.0", Type: "U8", Shape: []uint64{64}}}
		require.NoError(t, Write(&second, list, pad, func(x Tensor) (io.Reader, error) {
			return bytes.NewReader(content(x.Name, x.Len)), nil
		}))
		if offset = int64(second.Len()) - 64; offset > first.Size {
			t.Fatal("no such file can be made")
		}
	}
	m, err := Open(first, source("b", second.Bytes()))
	require.NoError(t, err)
	l := load(t, m, Config{Memory: make([]byte, 128)})
	for x, err := range l.All(within(t)) {
		require.NoError(t, err)
		same(t, x)
	}
}

// TestOrder reads in the order of need, and only what is named.
func TestOrder(t *testing.T) {
	m := model(t)
	names := []string{"c.1", "a.4", "a.5", "a.0", "a.6", "c.2"}
	l := load(t, m, Config{Memory: make([]byte, 20100), Names: names, Readers: 1, Piece: 999})
	var got []string
	for x, err := range l.All(within(t)) {
		require.NoError(t, err)
		same(t, x)
		got = append(got, x.Name)
		require.NoError(t, l.Release(x.Name))
	}
	require.Equal(t, names, got)
}

// TestWait has several wait for tensors by name, and release them at once.
func TestWait(t *testing.T) {
	testkit.CheckLeaks(t)
	m := model(t)
	l := load(t, m, Config{Memory: make([]byte, 22000), Piece: 300})
	var group sync.WaitGroup
	for _, x := range m.Tensors() {
		group.Go(func() {
			got, err := l.Wait(within(t), x.Name)
			if err != nil {
				t.Errorf("%s: %v", x.Name, err)
				return
			}
			same(t, got)
			if err := l.Release(x.Name); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	if _, err := l.Wait(within(t), "a.0"); !errors.Is(err, engine.ErrClosed) {
		t.Errorf("a tensor that was released: %v", err)
	}
	require.ErrorIs(t, l.Release("a.0"), engine.ErrBounds, "released twice")
	if _, err := l.Wait(within(t), "z"); !errors.Is(err, engine.ErrBounds) {
		t.Errorf("a tensor that nobody reads: %v", err)
	}
}

// TestNextLeavesOutWhatWasReleased: its memory has other bytes by then.
func TestNextLeavesOutWhatWasReleased(t *testing.T) {
	m, err := Open(shard(t, "a", 4096, 4096))
	require.NoError(t, err)
	l := load(t, m, Config{Memory: make([]byte, 4096)})
	_, err = l.Wait(within(t), "a.0")
	require.NoError(t, err)
	require.NoError(t, l.Release("a.0"))
	_, err = l.Wait(within(t), "a.1")
	require.NoError(t, err)
	x, err := l.Next(within(t))
	require.NoError(t, err)
	require.Equal(t, "a.1", x.Name)
	same(t, x)
	_, err = l.Next(within(t))
	require.ErrorIs(t, err, io.EOF)
}

// TestFull wants reading to stop when memory is full, to say so, and to go on.
func TestFull(t *testing.T) { testkit.InVirtualTime(t, full) }

func full(t *testing.T) {
	m, err := Open(shard(t, "a", 1000, 1000, 1000))
	require.NoError(t, err)
	l := load(t, m, Config{Memory: make([]byte, 2999)})
	for _, name := range []string{"a.0", "a.1"} {
		if _, err := l.Wait(within(t), name); err != nil {
			t.Fatal(err)
		}
	}
	short, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := l.Wait(short, "a.2"); !errors.Is(err, engine.ErrTimeout) ||
		!strings.Contains(err.Error(), "2 tensors in memory") {
		t.Errorf("with memory full: %v", err)
	}
	require.ErrorIs(t, l.Release("a.2"), engine.ErrBounds, "released before it arrived")
	if err := l.Release("a.1"); err != nil { // not the oldest: its memory is of no use yet
		t.Error(err)
	}
	if x, err := l.Wait(within(t), "a.0"); err != nil {
		t.Error(err)
	} else {
		same(t, x)
	}
	require.NoError(t, l.Release("a.0"))
	x, err := l.Wait(within(t), "a.2")
	require.NoError(t, err)
	same(t, x)
}

// TestEnds wants Close and a context that ends to stop the reading for good.
func TestEnds(t *testing.T) { testkit.InVirtualTime(t, ends) }

func ends(t *testing.T) {
	testkit.CheckLeaks(t)
	src := shard(t, "a", 1000, 1000)
	count := &counting{ReaderAt: src.ReaderAt, gate: make(chan struct{})}
	m, err := Open(src)
	require.NoError(t, err)
	m.sources[0].ReaderAt = count
	memory := make([]byte, 2000)
	ctx, cancel := context.WithCancel(context.Background())
	l, err := m.Load(ctx, Config{Memory: memory, Piece: 100, Readers: 2})
	require.NoError(t, err)
	for count.now.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	cancel()
	if _, err := l.Next(within(t)); !errors.Is(err, context.Canceled) {
		t.Errorf("after its context ended: %v", err)
	}
	under := count.now.Load() // a reader that had not begun may not begin any more
	closed := make(chan error, 1)
	go func() { closed <- l.Close() }()
	if under > 0 {
		select {
		case <-closed:
			t.Fatal("Close has not waited for the reads under way")
		case <-time.After(20 * time.Millisecond):
		}
	}
	close(count.gate)
	require.NoError(t, <-closed)
	if count.now.Load() != 0 || count.reads.Load() > 2 {
		t.Errorf("%d reads in all, %d under way after Close", count.reads.Load(), count.now.Load())
	}
	before := bytes.Clone(memory)
	if err := l.Close(); err != nil || !bytes.Equal(before, memory) {
		t.Errorf("closed again: %v", err)
	}
	if _, err := l.Wait(within(t), "a.1"); err == nil {
		t.Error("a tensor arrived after the end")
	}
}

// cut ends a file, or fails, at some byte.
type cut struct {
	io.ReaderAt
	at  int64
	err error
}

func (c cut) ReadAt(b []byte, at int64) (int, error) {
	if at+int64(len(b)) <= c.at {
		return c.ReaderAt.ReadAt(b, at)
	}
	n, _ := c.ReaderAt.ReadAt(b[:max(c.at-at, 0)], at)
	return n, c.err
}

// TestFaults names file and tensor of what cannot be read, and hands out what could.
func TestFaults(t *testing.T) {
	testkit.CheckLeaks(t)
	broken := errors.New("the disk is broken")
	for _, fault := range []error{broken, io.EOF, nil} {
		for _, piece := range []int{100, 1 << 20} {
			m, err := Open(shard(t, "a", 1000, 0, 1000, 1000))
			require.NoError(t, err)
			src := &m.sources[0]
			src.ReaderAt = cut{src.ReaderAt, m.Tensors()[2].offset + 500, fault}
			l := load(t, m, Config{Memory: make([]byte, 3000), Piece: piece, Readers: 1})
			for err == nil {
				var x Loaded
				if x, err = l.Next(within(t)); err == nil {
					same(t, x)
				}
			}
			var at *FileError
			if !errors.As(err, &at) || at.File != "a" || at.Tensor != "a.2" ||
				errors.Is(err, broken) != (fault == broken) ||
				errors.Is(err, engine.ErrCorrupt) == (fault == broken) {
				t.Errorf("%v, pieces of %d: %v", fault, piece, err)
			}
		}
	}
}

func TestMisuse(t *testing.T) {
	m := model(t)
	for name, c := range map[string]struct {
		cfg  Config
		want error
	}{
		"no memory":         {Config{}, engine.ErrBounds},
		"too little memory": {Config{Memory: make([]byte, 19999)}, engine.ErrBounds},
		"negative piece":    {Config{Memory: make([]byte, 1<<20), Piece: -1}, engine.ErrBounds},
		"many readers":      {Config{Memory: make([]byte, 1<<20), Readers: 1000}, engine.ErrBounds},
		"unknown name": {Config{Memory: make([]byte, 1<<20), Names: []string{"z"}},
			fs.ErrNotExist},
		"name twice": {Config{Memory: make([]byte, 1<<20), Names: []string{"a.0", "a.0"}},
			fs.ErrExist},
	} {
		if _, err := m.Load(within(t), c.cfg); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	var fault *FileError
	if _, err := Open(shard(t, "a", 1), shard(t, "a", 1)); !errors.As(err, &fault) ||
		fault.Tensor != "a.0" || !errors.Is(err, engine.ErrCorrupt) {
		t.Errorf("a name in two files: %v", err)
	}
	if _, ok := m.Tensor("z"); ok {
		t.Error("a tensor that is not there")
	}
	l := load(t, m, Config{Memory: make([]byte, 1), Names: []string{"b.0"}})
	if x, err := l.Wait(within(t), "b.0"); err != nil || x.Len != 0 {
		t.Errorf("an empty tensor: %+v, %v", x, err)
	}
}

// TestHammer reads models of any shape with memory of any size, released in any order by several.
func TestHammer(t *testing.T) {
	testkit.CheckLeaks(t)
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 2))
		var files []Source
		most := 1
		for f := range 1 + rng.IntN(4) {
			sizes := make([]int, rng.IntN(30))
			for i := range sizes {
				if rng.IntN(5) > 0 {
					sizes[i] = rng.IntN(1 << rng.IntN(13))
				}
				most = max(most, sizes[i])
			}
			files = append(files, shard(t, fmt.Sprint("f", f), sizes...))
		}
		m, err := Open(files...)
		require.NoError(t, err)
		var names []string
		for _, x := range m.Tensors() {
			names = append(names, x.Name)
		}
		if rng.IntN(2) == 0 {
			rng.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		}
		l := load(t, m, Config{Memory: make([]byte, most+rng.IntN(3*most)), Names: names,
			Piece: 1 + rng.IntN(9000), Readers: 1 + rng.IntN(5),
			Straight: rng.IntN(2) == 0})
		var group sync.WaitGroup
		var count atomic.Int64
		for range 3 {
			group.Go(func() {
				for x, err := range l.All(within(t)) {
					if err != nil {
						t.Errorf("seed %d: %v", seed, err)
						return
					}
					same(t, x)
					count.Add(1)
					if err := l.Release(x.Name); err != nil {
						t.Error(err)
					}
				}
			})
		}
		group.Wait()
		require.EqualValues(t, len(names), int(count.Load()), "seed %d: %d tensors of", seed,
			count.Load())
		require.NoError(t, l.Close())
	}
}

func TestWriteRefuses(t *testing.T) {
	empty := func(Tensor) (io.Reader, error) { return strings.NewReader(""), nil }
	one := Tensor{Name: "a", Type: "F32", Shape: []uint64{1}}
	for name, list := range map[string][]Tensor{
		"twice": {one, one}, "unknown type": {{Name: "a", Type: "F23"}},
		"half a byte":          {{Name: "a", Type: "F4"}},
		"a reserved name":      {{Name: "__metadata__", Type: "F32"}},
		"size past all bounds": {{Name: "a", Type: "F32", Shape: []uint64{1 << 40, 1 << 40}}},
	} {
		require.ErrorIs(t, Write(io.Discard, list, nil, empty), engine.ErrBounds, "%s", name)
	}
	require.ErrorIs(t, Write(io.Discard, []Tensor{one}, nil, empty), io.ErrUnexpectedEOF,
		"data that ends early")
}
