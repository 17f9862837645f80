// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestReference holds README.md against package engine and against sluice.h: what the one offers
// and the other declares is all in it, and nothing else is.
func TestReference(t *testing.T) {
	text, err := os.ReadFile("README.md")
	require.NoError(t, err)
	var inGo, inC []string
	code := regexp.MustCompile("`([^`]*)`")
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(line, "|")
		if len(cells) != 5 || strings.HasPrefix(cells[1], "--") || cells[1] == " Go " {
			continue
		}
		for _, m := range code.FindAllStringSubmatch(cells[1], -1) {
			inGo = append(inGo, m[1])
		}
		for _, m := range regexp.MustCompile(`\bsluice_\w+`).FindAllString(cells[2], -1) {
			inC = append(inC, m)
		}
	}
	same(t, "package engine", offered(t), inGo)
	header, err := os.ReadFile("sluice.h")
	require.NoError(t, err)
	var declared []string
	for _, m := range regexp.MustCompile(`(?m)^\w[\w ]*\**\b(sluice_\w+)\(`).FindAllSubmatch(header,
		-1) {
		declared = append(declared, string(m[1]))
	}
	same(t, "sluice.h", declared, slices.DeleteFunc(inC, func(s string) bool {
		return s == "sluice_segment"
	}))
}

// same reports what is on one list alone.
func same(t *testing.T, what string, there, here []string) {
	t.Helper()
	if len(there) < 20 {
		t.Fatalf("found no more than %q in %s", there, what)
	}
	for _, name := range there {
		if !slices.Contains(here, name) && name != "sluice_abi_version" {
			t.Errorf("%s has %s: say in README.md where it is, or why it is not", what, name)
		}
	}
	for _, name := range here {
		if !slices.Contains(there, name) {
			t.Errorf("README.md has %s, and %s has not", name, what)
		}
	}
}

// offered lists the functions and methods that package engine exports, and the fields of Route.
func offered(t *testing.T) (names []string) {
	files, err := filepath.Glob("../../engine/*.go")
	require.NoError(t, err)
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Name.IsExported() {
				if on, ok := receiver(f); ok {
					names = append(names, on+f.Name.Name)
				}
			}
		}
	}
	return append(names, "Route.Only", "Route.Durable")
}

// receiver is the type of a method with a dot, if it is exported; nothing for a function.
func receiver(f *ast.FuncDecl) (string, bool) {
	if f.Recv == nil {
		return "", true
	}
	on := f.Recv.List[0].Type
	if star, ok := on.(*ast.StarExpr); ok {
		on = star.X
	}
	name, ok := on.(*ast.Ident)
	return name.Name + ".", ok && name.IsExported()
}
