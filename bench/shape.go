// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/sluicehq/sluice/internal/figures"
)

// Shape describes an operation: it moves Batch pieces of Size bytes. Where says how they lie.
type Shape struct {
	Op    string `json:"op"` // OpWrite, OpRead or OpDurable, by the initiator
	Size  uint64 `json:"size"`
	Batch int    `json:"batch"`
	Where string `json:"where"` // Adjacent, Scattered, Shuffled, Pages, Gathered or Hot

	// Spread is the size of the memory from which places are drawn: for Scattered and Adjacent at
	// both ends, for Pages at the target, for Gathered at the initiator.
	Spread  uint64 `json:"spread,omitempty"`
	Threads int    `json:"threads,omitempty"` // goroutines that post; 0: 1
}

// The places of pieces.
const (
	Adjacent  = "adjacent"  // side by side at both ends, where an engine may merge them
	Scattered = "scattered" // at random places at both ends
	Shuffled  = "shuffled"  // one run at each end, in another order
	Pages     = "pages"     // one run at the initiator, random places at the target
	Gathered  = "gathered"  // random places at the initiator, one run at the target
	Hot       = "hot"       // all at the same place at each end, which stays in the CPU caches
)

// Bytes returns how many bytes one operation moves.
func (s *Shape) Bytes() uint64 { return s.Size * uint64(s.Batch) }

// String returns the name of the shape in tables.
func (s *Shape) String() string {
	return fmt.Sprintf("%s %s %d x %d", s.Op, s.Where, s.Batch, s.Size)
}

// ErrShape is wrapped by every error about a shape.
var ErrShape = errors.New("bad shape")

// The limits of a shape. The bytes that all threads move at once must fit into memory several
// times.
const (
	sizeMax    = 1 << 30
	batchMax   = 1 << 18
	threadsMax = 64
	bytesMax   = 4 << 30
	slotsMax   = 1 << 23 // slots from which places are drawn
)

// Check returns an error if the shape cannot be measured.
func (s *Shape) Check() error {
	limit := func(n uint64) string { return figures.FormatSize(n) }
	switch {
	case !slices.Contains([]string{OpWrite, OpRead, OpDurable, OpMatch}, s.Op):
		return fmt.Errorf("operation %q, want write, read, durable or match: %w", s.Op, ErrShape)
	case s.Size < 1 || s.Size > sizeMax:
		return fmt.Errorf("size %s, want 1B to %s: %w", limit(s.Size), limit(sizeMax), ErrShape)
	case s.Batch < 1 || s.Batch > batchMax:
		return fmt.Errorf("batch %d, want 1 to %d: %w", s.Batch, batchMax, ErrShape)
	case s.Threads < 0 || s.Threads > threadsMax:
		return fmt.Errorf("%d threads, want 1 to %d: %w", s.Threads, threadsMax, ErrShape)
	case s.Spread > bytesMax:
		return fmt.Errorf("spread %s, want at most %s: %w", limit(s.Spread), limit(bytesMax),
			ErrShape)
	case s.Bytes()*uint64(s.threads()) > bytesMax:
		return fmt.Errorf("%d threads x %d pieces x %s, want at most %s in all: %w", s.threads(),
			s.Batch, limit(s.Size), limit(bytesMax), ErrShape)
	}
	return nil
}

func (s *Shape) threads() int { return max(s.Threads, 1) }

// slots returns how many slots of Size bytes each end needs: one for each piece of each thread, or
// all of Spread where places are drawn at random.
func (s *Shape) slots() (local, remote int) {
	runs := s.threads() * s.Batch // one run for each thread
	switch spread := max(min(int(s.Spread/s.Size), slotsMax), runs); s.Where {
	case Hot:
		return s.threads(), s.threads()
	case Shuffled:
		return runs, runs
	case Pages:
		return runs, spread
	case Gathered:
		return spread, runs
	default:
		return spread, spread
	}
}

// memory returns how many bytes each end must register.
func (s *Shape) memory() (local, remote uint64) {
	here, there := s.slots()
	return uint64(here) * s.Size, uint64(there) * s.Size
}

// Threads use several lists of places in turn, so that small pieces do not stay in a CPU cache. All
// lists together have at most placesMax pieces, unless threads need more.
const (
	listsMax  = 64
	placesMax = 1 << 17
)

// places returns the lists of places at both ends: for each piece of an operation its slot. They
// are the same for all participants. Thread t uses the lists t, t+threads, t+2*threads and so on,
// and no two threads use the same slot.
func (s *Shape) places() (local, remote [][]int32) {
	here, there := s.slots()
	n := s.threads()
	lists := min(max(placesMax/s.Batch, 1), listsMax, max(here, there)/s.Batch)
	lists = max(lists/n, 1) * n
	random := rand.New(rand.NewPCG(s.Size, uint64(s.Batch)))
	local = s.placesAt(here, lists, random)
	remote = s.placesAt(there, lists, random)
	if s.Where == Shuffled {
		for l, list := range remote {
			remote[l] = slices.Clone(list)
			random.Shuffle(s.Batch, func(i, j int) {
				remote[l][i], remote[l][j] = remote[l][j], remote[l][i]
			})
		}
	}
	return local, remote
}

// placesAt returns the lists of one end, which has that many slots.
func (s *Shape) placesAt(slots, lists int, random *rand.Rand) [][]int32 {
	n := s.threads()
	order := make([]int32, slots)
	if s.Where == Scattered || slots > n*s.Batch && s.Where != Adjacent {
		for at, slot := range random.Perm(slots) {
			order[at] = int32(slot)
		}
	} else {
		for at := range order {
			order[at] = int32(at)
		}
	}
	places := make([][]int32, lists)
	for l := range places {
		switch {
		case s.Where == Hot:
			places[l] = slices.Repeat([]int32{int32(l % n)}, s.Batch)
		case slots < lists*s.Batch: // the lists of a thread have the same run
			places[l] = order[l%n*s.Batch:][:s.Batch]
		default:
			places[l] = order[l*s.Batch:][:s.Batch]
		}
	}
	return places
}

// The sizes and batches by which engines are compared.
var (
	sizes   = []uint64{656, 4 << 10, 64 << 10, 1 << 20, 16 << 20}
	batches = []int{1, 64, 2048}
)

// Shapes returns the shapes by which engines are compared: writes and reads, scattered and
// adjacent, in that many bytes of memory. It shortens a batch that would move more than half of the
// memory, and leaves out shapes that are then the same. A single piece is only scattered. With
// quick it returns the most important shapes only.
func Shapes(memory uint64, quick bool) []Shape {
	var list []Shape
	for _, size := range sizes {
		last := 0
		for _, batch := range batches {
			batch = min(batch, max(int(memory/2/size), 1))
			if batch == last {
				continue
			}
			last = batch
			for _, op := range []string{OpWrite, OpRead} {
				for _, where := range []string{Scattered, Adjacent} {
					s := Shape{Op: op, Size: size, Batch: batch, Where: where, Spread: memory}
					if batch == 1 && where == Adjacent || quick && !s.isQuick() {
						continue
					}
					list = append(list, s)
				}
			}
		}
	}
	return list
}

// wholeBlock is the alignment of offsets and lengths in a file that O_DIRECT needs. All engines
// move other pieces through the page cache.
const wholeBlock = 4 << 10

// FileShapes returns the shapes for a file of that many bytes: many requests at once, large
// requests, and pieces that are not whole blocks. With quick it leaves out medium sizes.
func FileShapes(memory uint64, quick bool) []Shape {
	var list []Shape
	for _, s := range []Shape{{Size: 4 << 10, Batch: 64}, {Size: 4 << 10, Batch: 2048},
		{Size: 64 << 10, Batch: 64}, {Size: 1 << 20, Batch: 16},
		{Size: 656, Batch: 2048}} {
		between := s.Size == 4<<10 && s.Batch == 2048 || s.Size == 64<<10
		s.Where, s.Spread = Scattered, memory
		for _, op := range []string{OpWrite, OpRead} {
			if s.Op = op; s.Bytes() <= memory/2 && !(quick && between) {
				list = append(list, s)
			}
		}
	}
	return list
}

// isQuick reports whether a quick run includes the shape: many small pieces, or few large ones.
func (s *Shape) isQuick() bool {
	switch {
	case s.Where == Adjacent:
		return s.Op == OpWrite && s.Size == 656 && s.Batch == 2048
	case s.Size == 656:
		return s.Batch != 64
	case s.Size == 4<<10:
		return s.Batch == 2048 && s.Op == OpWrite
	case s.Size == 64<<10:
		return s.Batch == 64
	}
	return s.Size == 1<<20 && s.Batch == 1
}

// What an operation with a cache moves by default, and how long a key is.
const (
	cacheBytes = 16 << 20
	keyBytes   = 16
)

// LaneShapes returns the few shapes that are measured on a lane by default.
func LaneShapes(lane Lane) []Shape {
	const (
		entries = 2048
		entry   = 656
	)
	both := func(list ...Shape) (all []Shape) {
		for _, s := range list {
			for _, op := range []string{OpRead, OpWrite} {
				s.Op = op
				all = append(all, s)
			}
		}
		return all
	}
	scattered := Shape{Size: entry, Batch: entries, Where: Pages, Spread: 1 << 30}
	gathered := Shape{Size: entry, Batch: entries, Where: Gathered, Spread: 64 << 20}
	runs := func(size uint64, batch int) Shape {
		return Shape{Op: OpWrite, Size: size, Batch: batch, Where: Shuffled}
	}
	file := func(size uint64, batch int) Shape {
		return Shape{Op: OpDurable, Size: size, Batch: batch, Where: Pages, Spread: fileMemory}
	}
	switch lane {
	case Process:
		return append([]Shape{runs(1, 1), runs(1<<20, 16)}, both(scattered)...)
	case TCP:
		return append([]Shape{runs(1<<20, 16), runs(64<<10, 64), runs(entry, 64)},
			both(scattered)...)
	case RDMA:
		return both(runs(64<<10, 128), runs(1<<20, 16), gathered)
	case File:
		list := both(file(1<<20, 8), file(64<<10, 32), file(4<<10, 32), file(4<<10, 1))
		list = append(list, file(64<<10, 32), file(4<<10, 32))
		for _, spread := range []uint64{fileMemory, 8 * entries * entry} {
			list = append(list, Shape{Op: OpRead, Size: entry, Batch: entries, Where: Pages,
				Spread: spread})
		}
		return list
	case Weights:
		return []Shape{{Op: OpRead, Size: 1 << 20, Batch: 1 << 10, Where: Adjacent}}
	case GPU:
		return both(scattered)
	case CacheShm, CacheTCP, CacheDisk:
		list := []Shape{{Op: OpMatch, Size: keyBytes, Batch: 4096, Where: Adjacent}}
		for _, size := range []uint64{64 << 10, 256 << 10, 1 << 20, 4 << 20} {
			list = append(list, both(Shape{Size: size, Batch: int(cacheBytes / size),
				Where: Scattered, Spread: fileMemory})...)
		}
		return list
	case GPUFile:
		return both(file(4<<20, 8), file(1<<20, 32), file(64<<10, 128), file(4<<10, 128))
	}
	return append([]Shape{runs(1<<20, 16), runs(entry, 64)}, both(scattered)...)
}
