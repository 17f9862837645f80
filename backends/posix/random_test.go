// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestRandomBatches moves random lists of pieces, scattered and side by side, long and short,
// aligned and not, and compares file and memory with a model after each.
func TestRandomBatches(t *testing.T) { randomBatches(t, 7) }

// TestSoakRandomBatches is TestRandomBatches of another seed each time.
func TestSoakRandomBatches(t *testing.T) { randomBatches(t, rand.Uint64()) }

func randomBatches(t *testing.T, seed uint64) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		random := rand.New(rand.NewPCG(seed, 2))
		for _, cfg.GapMax = range []int{0, -1, 64 << 10} {
			for _, cfg.Buffered = range []bool{false, true} {
				cfg.Depth, cfg.PieceMax = 1+random.IntN(20), (64<<10)*(1+random.IntN(3))
				testRandomBatches(t, cfg, random.Uint64())
			}
		}
	})
}

func testRandomBatches(t *testing.T, cfg Config, seed uint64) {
	const size = 2 << 20
	random := rand.New(rand.NewPCG(seed, 1))
	f := newFile(t, t.TempDir(), size)
	r := newRig(t, cfg, fileSegment(f, size), size)
	inFile, inMemory := make([]byte, size), make([]byte, size)
	past := r.file.CanDirect()
	defer func() { // no request has been refused for its alignment
		require.Equal(t, past, r.file.CanDirect(), r.file.Why)
	}()
	for round := range 14 {
		op := []driver.Op{driver.Read, driver.Write}[round%2]
		fill(r.mem, random)
		copy(inMemory, r.mem)
		descs := randomPieces(random, size)
		for _, d := range descs {
			if op == driver.Read {
				copy(inMemory[d.Local:][:d.Len], inFile[d.Remote:])
			} else {
				copy(inFile[d.Remote:][:d.Len], inMemory[d.Local:])
			}
		}
		require.NoError(t, r.move(t, op, descs...), "seed %d, round %d, %+v: %v of %d pieces", seed,
			round, cfg, op, len(descs))
		got, err := os.ReadFile(f.Name())
		if err != nil || !bytes.Equal(got, inFile) || !bytes.Equal(r.mem, inMemory) {
			t.Fatalf("seed %d, round %d, %+v: %v of %d pieces: wrong bytes (%v)", seed, round, cfg,
				op, len(descs), err)
		}
	}
}

// fill changes every byte.
func fill(p []byte, random *rand.Rand) {
	for ; len(p) >= 8; p = p[8:] {
		binary.LittleEndian.PutUint64(p, random.Uint64())
	}
}

// randomPieces cuts both sides into as many parts, none of which lies over another of its side,
// in any order. Many are neighbours, and many are aligned.
func randomPieces(random *rand.Rand, size uint64) []driver.Desc {
	lengths := []uint64{1, 8, 512, 656, 4095, 4096, 8192, 20_000, 65_536, 70_001, 131_072, 300_000}
	gaps := []uint64{0, 0, 0, 1, 512, 3440, 4096, 5000, 16 << 10, 40_000}
	var descs []driver.Desc
	at := gaps[random.IntN(len(gaps))]
	for limit := 1 + random.IntN(60); len(descs) < limit; {
		n := lengths[random.IntN(len(lengths))]
		if at+n > size {
			break
		}
		descs = append(descs, driver.Desc{Remote: at, Len: n})
		at += n + gaps[random.IntN(len(gaps))]
	}
	local, slack := uint64(0), size-total(descs)
	for _, i := range random.Perm(len(descs)) {
		shift := random.Uint64N(slack/uint64(len(descs)) + 1)
		if random.IntN(2) == 0 {
			shift &^= 4095
		}
		descs[i].Local = local + shift
		local += shift + descs[i].Len
	}
	if random.IntN(2) == 0 {
		random.Shuffle(len(descs), func(i, j int) { descs[i], descs[j] = descs[j], descs[i] })
	}
	return descs
}

func total(descs []driver.Desc) (n uint64) {
	for i := range descs {
		n += descs[i].Len
	}
	return n
}
