// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"fmt"
	"math/rand/v2"
)

// Lane is what lies between the two processes.
type Lane string

// The lanes.
const (
	Host Lane = "host" // one host, whatever a peer does best there
	TCP  Lane = "tcp"  // sockets, here over the loopback
	RDMA Lane = "rdma" // verbs, from a device of this host to itself
	File Lane = "file" // one process and a regular file: no peer
)

// Lanes are all of them, in the order of tables.
var Lanes = []Lane{Host, TCP, RDMA, File}

// Shape is what one operation moves: Batch pieces of Size bytes.
type Shape struct {
	Op    string `json:"op"` // "write" or "read", by the initiator
	Size  uint64 `json:"size"`
	Batch int    `json:"batch"`
	// pieces side by side at both ends; else at random places at both
	Adjacent bool `json:"adjacent"`
}

// Bytes is what one operation moves.
func (s *Shape) Bytes() uint64 { return s.Size * uint64(s.Batch) }

// String names the shape as tables do.
func (s *Shape) String() string {
	where := "scattered"
	if s.Adjacent {
		where = "adjacent"
	}
	return fmt.Sprintf("%s %s %d x %d", s.Op, where, s.Batch, s.Size)
}

// The sizes and batches that are compared.
var (
	sizes   = []uint64{656, 4 << 10, 64 << 10, 1 << 20, 16 << 20}
	batches = []int{1, 64, 2048}
)

// Shapes are all of them, writes and reads, scattered and adjacent. A batch of more than
// most bytes is cut to what those hold; what is then measured already is left out, as is
// the second arrangement of a single piece. quick keeps the ones that tell most.
func Shapes(most uint64, quick bool) []Shape {
	var list []Shape
	for _, size := range sizes {
		for _, batch := range cut(size, most) {
			for _, op := range []string{"write", "read"} {
				for _, adjacent := range []bool{false, true} {
					s := Shape{op, size, batch, adjacent}
					if batch == 1 && adjacent || quick && !s.telling() {
						continue
					}
					list = append(list, s)
				}
			}
		}
	}
	return list
}

// wholeBlock is what offsets and lengths of a file are multiples of where bytes go past the page
// cache. Pieces that are not go through it: no engine has another way.
const wholeBlock = 4 << 10

// FileShapes are those of a file: many requests at once, large ones, and pieces that are no blocks.
// quick leaves out those between.
func FileShapes(most uint64, quick bool) []Shape {
	var list []Shape
	for _, s := range []Shape{{Size: 4 << 10, Batch: 64}, {Size: 4 << 10, Batch: 2048},
		{Size: 64 << 10, Batch: 64}, {Size: 1 << 20, Batch: 16},
		{Size: 656, Batch: 2048}} {
		between := s.Size == 4<<10 && s.Batch == 2048 || s.Size == 64<<10
		for _, op := range []string{"write", "read"} {
			if s.Op = op; s.Bytes() <= most && !(quick && between) {
				list = append(list, s)
			}
		}
	}
	return list
}

// shapes are those of a run.
func (l Lane) shapes(o *Options) []Shape {
	if l == File {
		return FileShapes(l.memory(o)/2, o.Quick)
	}
	return Shapes(o.Batch, o.Quick)
}

// fileMemory bounds a file: each participant has one of its own, which is written anew.
const fileMemory = 256 << 20

// memory is what is registered at each end.
func (l Lane) memory(o *Options) uint64 {
	if l == File {
		return min(o.Memory, fileMemory)
	}
	return o.Memory
}

// cut are the batches of a size.
func cut(size, most uint64) []int {
	var list []int
	for _, batch := range batches {
		batch = min(batch, max(int(most/size), 1))
		if len(list) == 0 || batch > list[len(list)-1] {
			list = append(list, batch)
		}
	}
	return list
}

// telling shapes are those of a quick run: small and many, large and few.
func (s *Shape) telling() bool {
	switch {
	case s.Adjacent:
		return s.Op == "write" && s.Size == 656 && s.Batch == 2048
	case s.Size == 656:
		return s.Batch != 64
	case s.Size == 4<<10:
		return s.Batch == 2048 && s.Op == "write"
	case s.Size == 64<<10:
		return s.Batch == 64
	}
	return s.Size == 1<<20 && s.Batch == 1
}

// tellingFirst has the shapes of a quick run before the others.
func tellingFirst(a, b Shape) int {
	switch {
	case a.telling() == b.telling():
		return 0
	case a.telling():
		return -1
	}
	return 1
}

// How many lists of places are used in turn, so that none stays in a cache where it is
// small: together at most placesMax pieces.
const (
	listsMax  = 64
	placesMax = 1 << 17
)

// places draws the slots of each list at both ends, none of them twice at one end. They depend on
// the shape alone. The memory must hold the shape once at least.
func (s *Shape) places(memory uint64) (local, remote [][]int32) {
	slots := int(memory / s.Size)
	lists := min(max(placesMax/s.Batch, 1), listsMax, slots/s.Batch)
	random := rand.New(rand.NewPCG(s.Size, uint64(s.Batch)))
	for _, side := range []*[][]int32{&local, &remote} {
		order := s.order(random, slots, lists*s.Batch)
		for i := range lists {
			*side = append(*side, order[i*s.Batch:][:s.Batch])
		}
	}
	return local, remote
}

func (s *Shape) order(random *rand.Rand, slots, n int) []int32 {
	if s.Adjacent {
		order := make([]int32, n)
		for i := range order {
			order[i] = int32(i)
		}
		return order
	}
	order := make([]int32, n)
	for i, slot := range random.Perm(slots)[:n] {
		order[i] = int32(slot)
	}
	return order
}
