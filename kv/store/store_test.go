// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

var shape = Geometry{BlockBytes: 10_000, Blocks: 70, Tag: [32]byte{1, 2, 3}}

func create(t *testing.T) (*Store, string) {
	t.Helper()
	testkit.CheckLeaks(t)
	path := filepath.Join(t.TempDir(), "store")
	s, err := Create(path, shape, Options{})
	noError(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s, path
}

// TestNoRoom: a store that cannot fit takes nothing from what is left, and says what would mend it.
func TestNoRoom(t *testing.T) {
	testkit.CheckLeaks(t)
	path := filepath.Join(t.TempDir(), "store")
	_, err := Create(path, Geometry{BlockBytes: 4 << 30, Blocks: 1 << 18}, Options{}) // a petabyte
	errorIs(t, err, syscall.ENOSPC)
	var full *RoomError
	isTrue(t, errors.As(err, &full) && full.Path == path && full.Need > 1<<50 &&
		full.Free < full.Need, err)
	isTrue(t, strings.Contains(err.Error(), path) && strings.Contains(err.Error(), "fewer blocks"),
		err)
	_, err = os.Stat(path)
	errorIs(t, err, os.ErrNotExist)
}

func TestReopen(t *testing.T) {
	for _, durable := range []bool{false, true} {
		s, path := create(t)
		s.opts.Durable = durable
		content := make([]byte, 5000)
		content[17] = 1
		noError(t, s.Begin(3, 69))
		var last Block
		for i, block := range []uint32{3, 69} {
			_, err := s.f.WriteAt(content, int64(s.Segment().FileOff+uint64(block)*s.geo.Stride()))
			noError(t, err)
			b, err := s.Commit(block, Name{byte(i + 1)}, 5000, Sum(content))
			noError(t, err)
			isTrue(t, b.Seq > last.Seq, "sequence numbers rise")
			last = b
		}
		noError(t, s.Begin(3))
		noError(t, s.Close())
		noError(t, s.Close())

		s, err := Open(path, Options{})
		noError(t, err)
		equal(t, shape, s.Geometry())
		_, ok := s.Block(3)
		isFalse(t, ok, "a block that was begun")
		var found []uint32
		s.Each(func(i uint32, b Block) bool {
			equal(t, last, b)
			found = append(found, i)
			return true
		})
		equal(t, []uint32{69}, found)
		noError(t, last.Verify(append(content, 9)))
		content[17] = 2
		errorIs(t, last.Verify(content), engine.ErrCorrupt)
		errorIs(t, last.Verify(content[:10]), engine.ErrBounds)
		next, err := s.Commit(3, Name{7}, 1, 0)
		noError(t, err)
		isTrue(t, next.Seq > last.Seq, "sequence numbers rise")
		noError(t, s.Close())
	}
}

// TestSeqGoesOn: the number of a Commit is above that of each before it, also of one that Begin has
// taken back, or whose outcome was unsure, in a process before.
func TestSeqGoesOn(t *testing.T) {
	s, path := create(t)
	first, err := s.Commit(0, Name{1}, 4096, 7)
	noError(t, err)
	noError(t, s.Begin(0))
	noError(t, s.Close())
	for round := range 3 {
		s, err = Open(path, Options{})
		noError(t, err)
		_, ok := s.Block(0)
		isFalse(t, ok, "a block that was begun")
		next, err := s.Commit(uint32(round), Name{2}, 4096, 9)
		noError(t, err)
		isTrue(t, next.Seq > first.Seq, "Seq", next.Seq, "comes after", first.Seq)
		s.unsure[uint32(round)] = struct{}{}
		noError(t, s.Begin(uint32(round)))
		noError(t, s.Close())
		first = next
	}
}

func TestMisuse(t *testing.T) {
	s, path := create(t)
	_, err := Create(path, shape, Options{})
	errorIs(t, err, os.ErrExist)
	_, err = Open(path, Options{})
	errorIs(t, err, engine.ErrBusy)
	errorIs(t, s.Begin(0, 70), engine.ErrBounds)
	for _, c := range []struct {
		block uint32
		n     uint64
	}{{70, 1}, {math.MaxUint32, 1}, {0, 0}, {0, 10_001}} {
		_, err = s.Commit(c.block, Name{}, c.n, 0)
		errorIs(t, err, engine.ErrBounds, c)
	}
	_, err = s.Commit(1, Name{}, 1, 0)
	noError(t, err)
	_, err = s.Commit(1, Name{}, 1, 0)
	errorIs(t, err, engine.ErrBusy, "without Begin")
	_, ok := s.Block(math.MaxUint32)
	isFalse(t, ok)
	noError(t, s.Close())
	errorIs(t, s.Begin(1), engine.ErrClosed)
	_, err = s.Commit(1, Name{}, 1, 0)
	errorIs(t, err, engine.ErrClosed)
	for _, g := range []Geometry{{}, {BlockBytes: 1}, {Blocks: 1}, {BlockBytes: 5 << 30, Blocks: 1},
		{BlockBytes: 1, Blocks: 1 << 32}, {BlockBytes: 4 << 30, Blocks: 1 << 31}} {
		_, err := Create(filepath.Join(t.TempDir(), "s"), g, Options{})
		errorIs(t, err, engine.ErrBounds, g)
	}
}

// TestCommitFails has a record perhaps in the file that the store does not count on: the
// next Begin must take it away.
func TestCommitFails(t *testing.T) {
	s, path := create(t)
	_, err := s.Commit(5, Name{1}, 1, 0)
	noError(t, err)
	s.blocks[5], s.unsure[5] = Block{}, struct{}{} // as if that had failed after its write
	noError(t, s.Begin(5))
	noError(t, s.Close())
	s, err = Open(path, Options{})
	noError(t, err)
	defer s.Close()
	_, ok := s.Block(5)
	isFalse(t, ok)
}

// TestDamage turns over every bit of the header's page that is used, and of a record: the
// store is refused, or the block is empty.
func TestDamage(t *testing.T) {
	s, path := create(t)
	_, err := s.Commit(5, Name{1}, 1, 0)
	noError(t, err)
	noError(t, s.Close())
	whole, err := os.ReadFile(path)
	noError(t, err)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	noError(t, err)
	defer f.Close()
	flipped := func(bit int) (*Store, error) {
		at := int64(bit / 8)
		_, err := f.WriteAt([]byte{whole[at] ^ 1<<(bit%8)}, at)
		noError(t, err)
		s, err := Open(path, Options{})
		_, again := f.WriteAt(whole[at:at+1], at)
		noError(t, again)
		return s, err
	}
	for bit := range 8 * (headerUsed + 4) {
		_, err := flipped(bit)
		isTrue(t, errors.Is(err, engine.ErrCorrupt) || errors.Is(err, engine.ErrVersion), "bit",
			bit, err)
	}
	for bit := range 8 * recordBytes {
		s, err := flipped(8*(headerBytes+5*recordBytes) + bit)
		noError(t, err)
		_, ok := s.Block(5)
		isFalse(t, ok, "bit", bit)
		noError(t, s.Close())
	}
	// A record in another block's place is none.
	_, err = f.WriteAt(whole[headerBytes+5*recordBytes:][:recordBytes], headerBytes+6*recordBytes)
	noError(t, err)
	s, err = Open(path, Options{})
	noError(t, err)
	_, ok := s.Block(6)
	isFalse(t, ok)
	noError(t, s.Close())
	noError(t, f.Truncate(int64(len(whole))-1))
	_, err = Open(path, Options{})
	errorIs(t, err, engine.ErrCorrupt)
	noError(t, f.Truncate(100))
	_, err = Open(path, Options{})
	errorIs(t, err, engine.ErrCorrupt)
}

func FuzzDecode(f *testing.F) {
	b := Block{Name: Name{1}, Seq: 2, Len: 3, Sum: 4}
	f.Add(b.encode(nil, [16]byte{9}, 7))
	b = Block{Seq: 5}
	f.Add(b.encode(nil, [16]byte{9}, 7))
	f.Add(make([]byte, recordBytes))
	f.Fuzz(func(t *testing.T, p []byte) {
		if len(p) < recordBytes {
			return
		}
		got := decode(p[:recordBytes], &shape, [16]byte{9}, 7)
		if got.Len == 0 && got != (Block{Seq: got.Seq}) {
			t.Errorf("an empty block with %+v", got)
		}
		if got.Len != 0 && string(got.encode(nil, [16]byte{9}, 7)[:36]) != string(p[:36]) {
			t.Errorf("%x is %+v", p[:recordBytes], got)
		}
	})
}

// BenchmarkSum is what verification on read costs; BenchmarkCommit what the books do.
func BenchmarkSum(b *testing.B) {
	p := make([]byte, 1<<20)
	b.SetBytes(int64(len(p)))
	for b.Loop() {
		Sum(p)
	}
}

func BenchmarkCommit(b *testing.B) {
	for name, o := range map[string]Options{"cached": {}, "durable": {Durable: true}} {
		b.Run(name, func(b *testing.B) {
			s, err := Create(filepath.Join(b.TempDir(), "store"), shape, o)
			noError(b, err)
			defer s.Close()
			for b.Loop() {
				noError(b, s.Begin(1))
				if _, err := s.Commit(1, Name{1}, 1, 0); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
