// SPDX-License-Identifier: Apache-2.0

package lint

import (
	"go/ast"
	"go/token"
	"maps"
	"slices"
)

// packageComments wants each package to say what it is, in exactly one file.
func packageComments(files []*File) []Finding {
	first := map[string]*File{}
	comments := map[string]int{}
	for _, f := range files {
		if f.tree == nil || f.isTest() {
			continue
		}
		if first[f.dir()] == nil {
			first[f.dir()] = f
		}
		if f.tree.Doc != nil {
			comments[f.dir()]++
		}
	}
	var found []Finding
	for _, dir := range slices.Sorted(maps.Keys(first)) {
		f := first[dir]
		switch name := f.tree.Name.Name; comments[dir] {
		case 0:
			found = append(found, f.at(f.tree.Package,
				"package %s has no comment: say in one file what it is for and what "+
					"promises it makes", name))
		case 1:
		default:
			found = append(found, f.at(f.tree.Package,
				"package %s has %d comments: keep one, and part the others from the package "+
					"clause by an empty line", name, comments[dir]))
		}
	}
	return found
}

// exported wants a comment on every name that other packages see.
func exported(f *File) []Finding {
	if f.isTest() || f.isGenerated() || f.tree.Name.Name == "main" {
		return nil
	}
	var found []Finding
	missing := func(name *ast.Ident) {
		found = append(found, f.at(name.Pos(),
			"%s has no comment: say what it does, its units, errors and goroutine rules",
			name.Name))
	}
	for _, decl := range f.tree.Decls {
		switch d := decl.(type) {
		case *ast.FuncDecl:
			if d.Doc == nil && d.Name.IsExported() && receiverExported(d) {
				missing(d.Name)
			}
		case *ast.GenDecl:
			if d.Tok != token.IMPORT {
				undocumented(d, missing)
			}
		}
	}
	return found
}

// undocumented calls missing for each exported name that neither its group nor
// its own line documents. A comment on a group of types is not enough.
func undocumented(d *ast.GenDecl, missing func(*ast.Ident)) {
	for _, spec := range d.Specs {
		switch s := spec.(type) {
		case *ast.TypeSpec:
			grouped := d.Lparen.IsValid()
			if s.Name.IsExported() && s.Doc == nil && s.Comment == nil &&
				(d.Doc == nil || grouped) {
				missing(s.Name)
			}
		case *ast.ValueSpec:
			for _, name := range s.Names {
				if name.IsExported() && s.Doc == nil && s.Comment == nil && d.Doc == nil {
					missing(name)
				}
			}
		}
	}
}

// receiverExported reports whether a function is no method, or one of a type
// that other packages see.
func receiverExported(d *ast.FuncDecl) bool {
	if d.Recv == nil || len(d.Recv.List) == 0 {
		return true
	}
	for t := d.Recv.List[0].Type; ; {
		switch x := t.(type) {
		case *ast.StarExpr:
			t = x.X
		case *ast.IndexExpr:
			t = x.X
		case *ast.IndexListExpr:
			t = x.X
		case *ast.Ident:
			return x.IsExported()
		default:
			return true
		}
	}
}
