// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/sluicehq/sluice/driver"
)

// ErrGeometry is what specs, groups and sides that are not well formed are refused with.
var ErrGeometry = errors.New("bad KV geometry")

// SideVersion is the version of Side that this package writes, and the only one it takes.
const SideVersion = 1

// The bounds of a Side. They keep every product below 1 << 63.
const (
	LayersMax     = 1 << 12 // the deepest public model has 126
	PartsMax      = 8       // of a Tensors
	TokenBytesMax = 1 << 20 // of a cell
	TokensMax     = 1 << 16 // of a block
	BlocksMax     = 1 << 31 // of a pool; block numbers are uint32

	ViewsMax   = 1 << 15 // 4,096 layers of 8 parts
	GroupsMax  = 16      // of block tables
	RegionsMax = 1 << 10
	UnitsMax   = 1 << 20 // heads or state units of a part
	RanksMax   = 1 << 16
	nameMax    = 255 // bytes of a name
	sideMax    = math.MaxInt64

	poolBytesMax = 1 << 62 // offsets and lengths add up without overflow
)

// BlockTokens is the default length of a block.
const BlockTokens = 16

// Side is what one rank keeps where: the description of its KV cache that a peer needs for
// NewPlan. It is a plain value; any goroutine may read it while none changes it.
type Side struct {
	Version uint16 // SideVersion
	Model   string // the same on both sides of a plan
	Rank    int    // of its group; the groups of a plan are sorted by it
	DP      int    // data-parallel group; the ranks of one group of a plan share it

	Regions []Area
	Groups  []Group
	Views   []View // one for each layer and part that the rank holds
}

// Area is a region of memory by the name under which the engine has registered it.
type Area struct {
	Name  string
	Bytes uint64
}

// Group is a set of views that share a block table.
//
// Token t of a request lies in slot t/B of the table, where B is the View's Tokens. With
// Ring, slot numbers wrap. With Shards, a rank holds the tokens t with
// (t/Interleave)%Shards == Shard, and keeps them densely: its n-th token lies in slot n/B.
type Group struct {
	Blocks uint32 // of the pool; numbers in tables are below it
	State  bool   // one slot a request, whatever its length; B is the positions of a state
	Window int    // tokens that attention looks back; 0: all
	Ring   int    // slots of the table, when the engine reuses them in turn; 0: it does not

	Shards, Shard, Interleave int // of tokens; Shards 0 or 1: the rank holds all
}

// View is one part of one layer on one rank, as strides in bytes. The cell of block b,
// unit u (0 is global unit First) and position t of a block lies at
// Base + b*Block + u*Unit + t*Token of its region, and is Cell contiguous bytes.
type View struct {
	Layer int    // global number
	Part  string // "k", "v", "latent", "key", "scale", ...
	DType string // as the engine calls it; sides must agree to the letter
	Cell  uint64 // bytes of one token in one unit

	Units, First, Count int // heads or state units: of the model, first here, held here
	Tokens              int // tokens of a block; positions of a state

	Region, Group            int // indices of Side.Regions and Side.Groups
	Base, Block, Unit, Token uint64
}

// Check reports whether the side is well formed: within the bounds of this package, each
// view within its region, and no two cells of a view in the same bytes. Errors are
// ErrGeometry or ErrSideVersion. Views are not compared with each other.
func (s *Side) Check() error {
	switch {
	case s.Version != SideVersion:
		return fmt.Errorf("side of rank %d has version %d, this program takes %d: run the same "+
			"release on both sides: %w", s.Rank, s.Version, SideVersion, ErrSideVersion)
	case s.Model == "" || len(s.Model) > nameMax:
		return fmt.Errorf("side: model name of %d bytes, want 1 to %d: %w", len(s.Model), nameMax,
			ErrGeometry)
	case s.Rank < 0 || s.Rank >= RanksMax || s.DP < 0 || s.DP >= RanksMax:
		return fmt.Errorf("side: rank %d, data-parallel group %d: %w", s.Rank, s.DP, ErrGeometry)
	case len(s.Regions) > RegionsMax || len(s.Groups) > GroupsMax:
		return fmt.Errorf("side: %d regions, %d groups: %w", len(s.Regions), len(s.Groups),
			ErrGeometry)
	case len(s.Views) < 1 || len(s.Views) > ViewsMax:
		return fmt.Errorf("side: %d views, want 1 to %d: %w", len(s.Views), ViewsMax, ErrGeometry)
	}
	for i := range s.Regions {
		if n := len(s.Regions[i].Name); n < 1 || n > nameMax {
			return fmt.Errorf("side: region name of %d bytes: %w", n, ErrGeometry)
		}
		if s.Regions[i].Bytes > sideMax {
			return fmt.Errorf("side: region %q of %d bytes: %w", s.Regions[i].Name,
				s.Regions[i].Bytes, ErrGeometry)
		}
	}
	for i := range s.Groups {
		if err := s.Groups[i].check(); err != nil {
			return fmt.Errorf("side: group %d: %w", i, err)
		}
	}
	seen := make(map[key]bool, len(s.Views))
	for i := range s.Views {
		v := &s.Views[i]
		if err := s.checkView(v); err != nil {
			return fmt.Errorf("side: layer %d, part %q: %w", v.Layer, v.Part, err)
		}
		if seen[v.key()] {
			return fmt.Errorf("side: layer %d, part %q twice: %w", v.Layer, v.Part, ErrGeometry)
		}
		seen[v.key()] = true
	}
	return nil
}

func (g *Group) check() error {
	sharded := g.Shards > 1
	switch {
	case g.Blocks < 1 || g.Blocks > BlocksMax:
		return fmt.Errorf("%d blocks, want 1 to %d: %w", g.Blocks, uint64(BlocksMax), ErrGeometry)
	case g.Window < 0 || g.Window > BlocksMax || g.Ring < 0 || g.Ring > BlocksMax:
		return fmt.Errorf("window of %d tokens, ring of %d slots: %w", g.Window, g.Ring,
			ErrGeometry)
	case g.Ring > 0 && g.Window == 0:
		return fmt.Errorf("a ring of %d slots without a window: %w", g.Ring, ErrGeometry)
	case g.Shards < 0 || g.Shards > RanksMax ||
		!sharded && (g.Shard != 0 || g.Interleave != 0) ||
		sharded && (g.Shard < 0 || g.Shard >= g.Shards ||
			g.Interleave < 1 || g.Interleave > TokensMax):
		return fmt.Errorf("shard %d of %d, interleaved by %d tokens: %w", g.Shard, g.Shards,
			g.Interleave, ErrGeometry)
	case g.State && (sharded || g.Window != 0):
		return fmt.Errorf("a state with a window or shards of tokens: %w", ErrGeometry)
	case sharded && g.Ring > 0:
		return fmt.Errorf("a ring with shards of tokens: %w", ErrGeometry)
	}
	return nil
}

func (s *Side) checkView(v *View) error {
	switch {
	case v.Layer < 0 || v.Layer >= LayersMax:
		return fmt.Errorf("want a layer below %d: %w", LayersMax, ErrGeometry)
	case v.Part == "" || len(v.Part) > nameMax || v.DType == "" || len(v.DType) > nameMax:
		return fmt.Errorf("names of %d and %d bytes: %w", len(v.Part), len(v.DType), ErrGeometry)
	case v.Cell < 1 || v.Cell > TokenBytesMax:
		return fmt.Errorf("cells of %d bytes: %w", v.Cell, ErrGeometry)
	case v.Tokens < 1 || v.Tokens > TokensMax:
		return fmt.Errorf("%d tokens a block: %w", v.Tokens, ErrGeometry)
	case v.Units < 1 || v.Units > UnitsMax || v.First < 0 || v.Count < 1 ||
		v.First >= v.Units || v.Count > v.Units-v.First:
		return fmt.Errorf("units %d to %d of %d: %w", v.First, v.First+v.Count, v.Units,
			ErrGeometry)
	case v.Region < 0 || v.Region >= len(s.Regions) || v.Group < 0 || v.Group >= len(s.Groups):
		return fmt.Errorf("region %d of %d, group %d of %d: %w", v.Region, len(s.Regions),
			v.Group, len(s.Groups), ErrGeometry)
	}
	g := &s.Groups[v.Group]
	if g.Ring > 0 && g.Ring*v.Tokens < g.Window {
		return fmt.Errorf("a ring of %d tokens for a window of %d: %w", g.Ring*v.Tokens, g.Window,
			ErrGeometry)
	}
	axes := [3]axis{{uint64(g.Blocks), v.Block, v.Block}, {uint64(v.Count), v.Unit, v.Unit},
		{uint64(v.Tokens), v.Token, v.Token}}
	slices.SortFunc(axes[:], func(a, b axis) int {
		return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.n, b.n))
	})
	extent := v.Cell
	for _, a := range axes {
		if a.n == 1 {
			continue
		}
		if a.from < extent {
			return fmt.Errorf("a stride of %d bytes within %d: cells overlap: %w", a.from, extent,
				ErrGeometry)
		}
		over, product := bits.Mul64(a.n-1, a.from)
		if over != 0 || product > sideMax-extent {
			return fmt.Errorf("a stride of %d bytes %d times is too large: %w", a.from, a.n,
				ErrGeometry)
		}
		extent += product
	}
	if size := s.Regions[v.Region].Bytes; v.Base > size || extent > size-v.Base {
		return fmt.Errorf("%d bytes at %d are past the %d of region %q: %w", extent, v.Base, size,
			s.Regions[v.Region].Name, ErrGeometry)
	}
	return nil
}

// Range is a run of bytes in a region.
type Range = driver.Range

// key is what a view holds.
type key struct {
	layer int
	part  string
}

func (v *View) key() key { return key{v.Layer, v.Part} }

// shards returns how many shards of tokens there are, at least 1.
func (g *Group) shards() int { return max(1, g.Shards) }
