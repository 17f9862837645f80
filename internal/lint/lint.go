// SPDX-License-Identifier: Apache-2.0

// Package lint holds the rules of this house that a program can check, and runs
// them as a test. Each message says what to do instead.
package lint

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path"
	"slices"
	"strings"
)

// Finding is one place that breaks a rule.
type Finding struct {
	Path    string // slashes, relative to the module
	Line    int    // 0: the whole file
	Message string // what is wrong and what to do
}

// String returns "path:line: message", as compilers print it.
func (f Finding) String() string { return fmt.Sprintf("%s:%d: %s", f.Path, f.Line, f.Message) }

// File is one file of the module.
type File struct {
	Path string // slashes, relative to the module
	Text string

	fset *token.FileSet
	tree *ast.File // nil unless it is Go
}

// NewFile parses a Go file; any other is kept as text.
func NewFile(name, text string) (*File, error) {
	f := &File{Path: name, Text: text}
	if path.Ext(name) != ".go" {
		return f, nil
	}
	f.fset = token.NewFileSet()
	tree, err := parser.ParseFile(f.fset, name, text, parser.ParseComments|
		parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	f.tree = tree
	return f, nil
}

// Check applies every rule and returns the findings in order of path and line.
func Check(files []*File) []Finding {
	var found []Finding
	for _, f := range files {
		for _, rule := range textRules {
			found = append(found, rule(f)...)
		}
		if f.tree == nil {
			continue
		}
		for _, rule := range goRules {
			found = append(found, rule(f)...)
		}
	}
	slices.SortStableFunc(found, func(a, b Finding) int {
		return cmp.Or(strings.Compare(a.Path, b.Path), cmp.Compare(a.Line, b.Line))
	})
	return found
}

var textRules = []func(*File) []Finding{license, columns}

var goRules = []func(*File) []Finding{cgo, arrows, guests, skips, tiers}

func (f *File) isTest() bool { return strings.HasSuffix(f.Path, "_test.go") }

func (f *File) isGenerated() bool { return f.tree != nil && ast.IsGenerated(f.tree) }

// dir is the folder, "." for the root.
func (f *File) dir() string { return path.Dir(f.Path) }

// under reports whether the file lies in one of the folders or below it.
func (f *File) under(folders ...string) bool {
	return slices.ContainsFunc(folders, func(folder string) bool { return inside(f.dir(), folder) })
}

func inside(dir, folder string) bool { return dir == folder || strings.HasPrefix(dir, folder+"/") }

func (f *File) at(pos token.Pos, format string, args ...any) Finding {
	return Finding{f.Path, f.fset.Position(pos).Line, fmt.Sprintf(format, args...)}
}

func (f *File) line(number int, format string, args ...any) Finding {
	return Finding{f.Path, number, fmt.Sprintf(format, args...)}
}
