// SPDX-License-Identifier: Apache-2.0

package lint

import (
	"go/token"
	"slices"
	"strconv"
	"strings"
)

// suite is test code outside _test.go files: backends call it from their tests.
const suite = "driver/drivertest"

const module = "github.com/sluicehq/sluice"

// imported is an import of a file.
type imported struct {
	pos   token.Pos
	name  string
	local string // folder in this module, "" for another module
}

func (f *File) imports() []imported {
	var list []imported
	for _, spec := range f.tree.Imports {
		name, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			continue // the parser has refused it
		}
		local, ok := strings.CutPrefix(name, module+"/")
		if !ok {
			local = ""
		}
		list = append(list, imported{spec.Pos(), name, local})
	}
	return list
}

// cgo finds import "C" outside the folders that may call C.
func cgo(f *File) []Finding {
	if f.under("csrc", "cuda", "bindings") {
		return nil
	}
	return f.forbid(func(i imported) bool { return i.name == "C" },
		`import "C" stands in csrc, cuda and bindings only: call a function of csrc`)
}

// arrow names packages that others must not import. Tests may import all, since they put parts
// together.
type arrow struct {
	from    []string // folders
	mustNot []string // folders of this module
	instead string
	except  []string // folders within from
}

var forbidden = []arrow{
	{
		from:    []string{"engine"},
		mustNot: []string{"backends", "csrc", "cuda", "kv", "bench", "cmd", "bindings"},
		instead: "the engine knows the contract alone: find what you need in package driver",
	},
	{
		from:    []string{"backends", "driver"},
		mustNot: []string{"engine", "kv", "bench", "cmd", "bindings"},
		instead: "a backend is called by the engine and knows nothing of it: put what both need " +
			"in package driver",
	},
	{
		from:    []string{"kv"},
		mustNot: []string{"backends", "cuda", "bench", "cmd", "bindings"},
		instead: "kv is built on package engine: take an *engine.Engine from the caller",
	},
	{
		from:    []string{"kv"},
		mustNot: []string{"csrc"},
		instead: "kv moves bytes by package engine",
	},
	{
		from: []string{"driver", "engine", "backends", "kv", "bench", "replay", "bindings",
			"identity"},
		mustNot: []string{"kv/tier/object/s3"},
		instead: "who uses the library compiles no client of S3: take an object.Bucket",
	},
	{
		from:    []string{"csrc", "cuda"},
		mustNot: []string{"engine", "backends", "kv", "bench", "cmd", "bindings"},
		instead: "the C side serves backends and knows none",
	},
	{
		from:    []string{"internal"},
		mustNot: []string{"engine", "backends", "kv", "bench", "cmd", "bindings", "csrc", "cuda"},
		instead: "internal packages lie below everything but the contract",
	},
	{
		from:    []string{"bench", "replay"},
		mustNot: []string{"cmd", "bindings"},
		instead: "cmd calls bench and replay, not the reverse",
	},
	{
		from: []string{"driver", "engine", "backends", "kv", "bench", "replay", "csrc", "cuda",
			"bindings", "cmd"},
		mustNot: []string{"internal/lint", "internal/testing"},
		instead: "this package is for tests",
		except:  []string{suite},
	},
}

// arrows finds imports that an arrow forbids.
func arrows(f *File) []Finding {
	if f.isTest() {
		return nil
	}
	var found []Finding
	if f.dir() == "driver" {
		found = f.forbid(func(i imported) bool { return strings.Contains(i.name, ".") },
			"the contract imports the standard library alone: let the implementations know others")
	}
	for _, a := range forbidden {
		if !f.under(a.from...) || f.under(a.except...) {
			continue
		}
		found = append(found, f.forbid(func(i imported) bool {
			return slices.ContainsFunc(a.mustNot, func(folder string) bool {
				return reaches(f, i, folder)
			})
		}, a.instead)...)
	}
	return found
}

// plain are packages that compute and move nothing: all may use them.
var plain = []string{"csrc/digest", "csrc/sparse"}

// reaches reports whether an import lies in a folder that the file is not in.
func reaches(f *File, i imported, folder string) bool {
	if i.local == "" || slices.Contains(plain, i.local) {
		return false
	}
	return inside(i.local, folder) && !inside(f.dir(), folder)
}

// guests finds imports of other modules outside the folders that may use them.
func guests(f *File) []Finding {
	var found []Finding
	if !f.under("cmd", "bench") {
		found = f.forbid(func(i imported) bool {
			return strings.Contains(i.name, "spf13/cobra")
		}, "command lines are the business of cmd: return values and errors")
	}
	if !f.isTest() && !f.under(suite, "internal/testing") {
		found = append(found, f.forbid(func(i imported) bool {
			return strings.Contains(i.name, "stretchr/testify")
		}, "testify is for tests: return values and errors")...)
	}
	return found
}

func (f *File) forbid(bad func(imported) bool, message string) []Finding {
	var found []Finding
	for _, i := range f.imports() {
		if bad(i) {
			found = append(found, f.at(i.pos, "import of %q: %s", i.name, message))
		}
	}
	return found
}
